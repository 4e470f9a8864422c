"""GradNormMonitor: the norm before clipping, and the fraction of clipped steps."""

import csv
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from callbacks.grad_norm.callback import GradNormMonitor


class _KeepingStrategy(SingleDeviceStrategy):
    """Keeps the norm and the threshold of each step, as an engine that clips does."""

    grad_norm: Tensor | None = None
    clip_threshold: Tensor | None = None
    clipping: str | None = None

    def __init__(self, norms: list[float]) -> None:
        super().__init__("cpu")
        self.norms = norms

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        step = self.lightning_module.trainer.global_step
        self.grad_norm, self.clip_threshold = torch.tensor(self.norms[step]), torch.tensor(2.5)
        return result


def test_the_computed_norm_is_the_one_before_clipping(plain_module, make_trainer, read_column) -> None:
    module = plain_module()
    with torch.no_grad():
        module.layer.weight.fill_(1.0)
        module.layer.bias.zero_()
    # loss = (w.1 + b)^2 with w.1 = 4: every one of the 5 gradients is 2 * 4 = 8, norm 8 * sqrt(5)
    make_trainer(callbacks=[GradNormMonitor()], max_steps=1, gradient_clip_val=0.5).fit(module)
    assert read_column("grad/norm") == [pytest.approx(8 * 5**0.5, rel=1e-6)]


@pytest.mark.parametrize("fused", [False, True])
def test_under_float16_the_norm_is_without_the_loss_scale(plain_module, make_trainer, read_column, fused: bool) -> None:
    class Fused(plain_module):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)  # unscales in its own kernel

    module = Fused()
    with torch.no_grad():
        module.layer.weight.fill_(1.0)
        module.layer.bias.zero_()
    monitor = GradNormMonitor(per_block=True)
    # given as a plugin, since Lightning turns precision="16-mixed" into bfloat16 on a CPU
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    make_trainer(callbacks=[monitor], max_steps=1, plugins=[precision]).fit(module)
    # as above: 8 * sqrt(5), which float16 rounds to three digits; the scale would make it 256 times larger
    assert read_column("grad/norm") == [pytest.approx(8 * 5**0.5, rel=1e-3)]
    assert read_column("grad/norm/layer") == [pytest.approx(8 * 5**0.5, rel=1e-3)]


@pytest.mark.parametrize("by", ["its strategy", "its gradients"])
def test_two_of_four_steps_above_the_limit_are_a_fraction_of_one_half(
    plain_module, make_trainer, read_column, by: str
) -> None:
    norms = [2.0, 0.5, 3.0, 1.0, 0.1, 0.2, 9.0, 0.3]
    module, options = plain_module(), {"gradient_clip_val": 1.0, "log_every_n_steps": 4}
    if by == "its strategy":
        options["strategy"] = _KeepingStrategy(norms)
    else:

        def set_gradients(optimizer: torch.optim.Optimizer) -> None:
            for parameter in module.parameters():
                parameter.grad.zero_()
            module.layer.bias.grad.fill_(norms[module.trainer.global_step])

        module.on_after_backward = lambda: set_gradients(module.optimizers())
    make_trainer(callbacks=[GradNormMonitor()], **options).fit(module)
    assert read_column("grad/norm") == [1.0, pytest.approx(0.3)]
    assert read_column("grad/clipped_fraction") == [0.5, 0.25]


@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}])
def test_there_is_no_clipped_fraction_without_clipping_by_norm(plain_module, make_trainer, tmp_path, clipping) -> None:
    trainer = make_trainer(callbacks=[GradNormMonitor()], strategy=_KeepingStrategy([2.0] * 8), **clipping)
    trainer.fit(plain_module())
    text = (tmp_path / "run" / "metrics.csv").read_text()
    assert "grad/norm" in text
    assert "grad/clipped_fraction" not in text


def test_the_norm_is_computed_at_logged_steps_only(plain_module, make_trainer, monkeypatch) -> None:
    calls = []
    compute = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda *arguments: calls.append(1) or compute(*arguments))
    make_trainer(callbacks=[GradNormMonitor()], log_every_n_steps=4).fit(plain_module())
    assert len(calls) == 2  # steps 4 and 8


@pytest.mark.parametrize("own", [dict, torch.tensor(99.0)])
def test_an_attribute_of_the_module_called_grad_norm_is_not_read(plain_module, make_trainer, read_column, own) -> None:
    module = plain_module()
    module.grad_norm = own
    make_trainer(callbacks=[GradNormMonitor()], max_steps=2).fit(module)
    assert len(read_column("grad/norm")) == 2
    assert 99.0 not in read_column("grad/norm")


def test_each_of_several_optimizers_has_its_norm_in_the_rows_of_its_own_steps(
    plain_module, make_trainer, tmp_path
) -> None:
    class Gan(plain_module):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for index, optimizer in enumerate(self.optimizers()):
                if index == 0 or batch_idx % 2 == 0:  # the second steps at every other batch
                    optimizer.zero_grad()
                    parameters = optimizer.param_groups[0]["params"]
                    self.manual_backward((index + 1) * sum(parameter.sum() for parameter in parameters))
                    optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.layer, self.other)]

    make_trainer(callbacks=[GradNormMonitor(per_block=True)], max_epochs=1).fit(Gan())
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    first, second = ([row[f"grad/norm/optimizer_{index}"] for row in rows] for index in (0, 1))
    # five gradients of 1 and of 2
    assert [float(norm) for norm in first] == pytest.approx([5**0.5] * 8)
    assert [float(norm) if norm else None for norm in second] == [pytest.approx(2 * 5**0.5), None] * 4
    assert [bool(row["grad/norm/other"]) for row in rows] == [True, False] * 4
    assert "grad/norm" not in rows[0]


def test_a_row_without_a_norm_does_not_repeat_the_one_before(plain_module, make_trainer, read_column) -> None:
    class Refusing(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step % 2:
                optimizer.zero_grad(set_to_none=True)

    make_trainer(callbacks=[Refusing(), GradNormMonitor()]).fit(plain_module())
    assert len(read_column("train_loss")) == 8
    assert len(read_column("grad/norm")) == 4


def test_counts_survive_a_checkpoint_between_two_rows(plain_module, make_trainer) -> None:
    first = GradNormMonitor()
    strategy = _KeepingStrategy([2.0] * 5 + [0.5] * 2)
    trainer: Trainer = make_trainer(
        callbacks=[first], gradient_clip_val=1.0, log_every_n_steps=4, max_steps=7, strategy=strategy
    )
    trainer.fit(plain_module())
    state = first.state_dict()
    assert (state["num_steps"], state["num_clipped"], list(state["trends"])) == (3, 1, [0])
    second = GradNormMonitor()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_norm_and_threshold_of_a_strategy_come_before_computed_ones(plain_module, make_trainer, read_column) -> None:
    strategy = _KeepingStrategy([1.0, 2.0, 3.0, 4.0])
    strategy.clipping = "adaptive"
    make_trainer(callbacks=[GradNormMonitor()], strategy=strategy, max_steps=4).fit(plain_module())
    assert read_column("grad/norm") == [1.0, 2.0, 3.0, 4.0]
    assert read_column("grad/clip_threshold") == [2.5] * 4
    assert read_column("grad/clipped_fraction") == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"vanishing": -1.0}, {"rising": 1.0}, {"rising": float("nan")}])
def test_a_limit_outside_its_range_is_an_error_that_names_it(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        GradNormMonitor(**wrong)


def test_a_strategy_that_never_sets_its_norm_leaves_it_to_be_computed(plain_module, make_trainer, read_column) -> None:
    class Idle(SingleDeviceStrategy):
        grad_norm = clip_threshold = clipping = None

    make_trainer(callbacks=[GradNormMonitor()], strategy=Idle("cpu"), max_steps=2).fit(plain_module())
    assert len(read_column("grad/norm")) == 2


def test_steps_of_a_policy_without_a_gradient_are_said_once_to_lack_spread(plain_module, make_trainer, caplog) -> None:
    class Policy(plain_module):  # type: ignore[misc, valid-type]
        def recipes_completions(self, num_completions: int) -> list[dict[str, Any]]:
            return []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (batch_idx % 2)  # type: ignore[no-any-return]

    make_trainer(callbacks=[GradNormMonitor()], max_steps=6).fit(Policy())
    [line] = [record.message for record in caplog.records if "gradient" in record.message]
    assert line.startswith("Step 1: the gradient is 0: in no group of completions do the rewards differ")
