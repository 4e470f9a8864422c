"""GradNormMonitor: the norm before clipping, and the fraction of clipped steps."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from callbacks.grad_norm.callback import GradNormMonitor


def make_norm_keeper(base: type, norms: list[float]) -> Any:
    """Make a module that sets `grad_norm` at each step, as code that clips does."""

    class Keeper(base):  # type: ignore[misc]
        grad_norm: Tensor | None = None

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.grad_norm = torch.tensor(norms[self.trainer.global_step])

    return Keeper()


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


def test_a_module_without_norms_gets_no_clipped_fraction(plain_module, make_trainer, tmp_path) -> None:
    make_trainer(callbacks=[GradNormMonitor()], gradient_clip_val=0.5).fit(plain_module())
    assert "grad/clipped_fraction" not in (tmp_path / "run" / "metrics.csv").read_text()


def test_two_of_four_steps_above_the_limit_are_a_fraction_of_one_half(plain_module, make_trainer, read_column) -> None:
    norms = [2.0, 0.5, 3.0, 1.0, 0.1, 0.2, 9.0, 0.3]
    trainer = make_trainer(callbacks=[GradNormMonitor()], gradient_clip_val=1.0, log_every_n_steps=4)
    trainer.fit(make_norm_keeper(plain_module, norms))
    assert read_column("grad/norm") == [1.0, pytest.approx(0.3)]
    assert read_column("grad/clipped_fraction") == [0.5, 0.25]


@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}])
def test_there_is_no_clipped_fraction_without_clipping_by_norm(plain_module, make_trainer, tmp_path, clipping) -> None:
    make_trainer(callbacks=[GradNormMonitor()], **clipping).fit(make_norm_keeper(plain_module, [2.0] * 8))
    text = (tmp_path / "run" / "metrics.csv").read_text()
    assert "grad/norm" in text
    assert "grad/clipped_fraction" not in text


def test_the_norm_is_computed_at_logged_steps_only(plain_module, make_trainer, monkeypatch) -> None:
    calls = []
    compute = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads: calls.append(1) or compute(grads))
    make_trainer(callbacks=[GradNormMonitor()], log_every_n_steps=4).fit(plain_module())
    assert len(calls) == 2  # steps 4 and 8


def test_a_method_called_grad_norm_is_not_read_as_a_norm(plain_module, make_trainer, read_column) -> None:
    class Old(plain_module):  # type: ignore[misc, valid-type]
        def grad_norm(self) -> dict[str, float]:
            return {}

    make_trainer(callbacks=[GradNormMonitor()], max_steps=2).fit(Old())
    assert len(read_column("grad/norm")) == 2


def test_counts_survive_a_checkpoint_between_two_rows(plain_module, make_trainer, tmp_path) -> None:
    first = GradNormMonitor()
    trainer: Trainer = make_trainer(callbacks=[first], gradient_clip_val=1.0, log_every_n_steps=4, max_steps=7)
    trainer.fit(make_norm_keeper(plain_module, [2.0] * 5 + [0.5] * 2))
    assert first.state_dict() | {"trend": None} == {"num_steps": 3, "num_clipped": 1, "trend": None}
    second = GradNormMonitor()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


class _KeepingStrategy(SingleDeviceStrategy):
    """Keeps the norm and the threshold of each step, as an engine that clips does."""

    grad_norm: Tensor | None = None
    clip_threshold: Tensor | None = None
    clipping = "adaptive"

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        step = self.lightning_module.trainer.global_step
        self.grad_norm, self.clip_threshold = torch.tensor(float(step + 1)), torch.tensor(2.5)
        return result


def test_norm_and_threshold_of_the_strategy_come_before_those_of_the_module(
    plain_module, make_trainer, read_column, monkeypatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads: torch.tensor(99.0))
    trainer = make_trainer(callbacks=[GradNormMonitor()], strategy=_KeepingStrategy("cpu"), max_steps=4)
    trainer.fit(make_norm_keeper(plain_module, [50.0] * 4))
    assert read_column("grad/norm") == [1.0, 2.0, 3.0, 4.0]
    assert read_column("grad/clip_threshold") == [2.5] * 4
    assert read_column("grad/clipped_fraction") == [0.0, 0.0, 1.0, 1.0]


def test_a_strategy_that_never_sets_its_norm_leaves_it_to_be_computed(plain_module, make_trainer, read_column) -> None:
    class Idle(SingleDeviceStrategy):
        grad_norm: Tensor | None = None

    make_trainer(callbacks=[GradNormMonitor()], strategy=Idle("cpu"), max_steps=2).fit(plain_module())
    assert len(read_column("grad/norm")) == 2
