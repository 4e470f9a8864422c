"""GradNormMonitor: the norm before clipping, and how often clipping acted."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from callbacks.grad_norm.callback import GradNormMonitor


def keeping_norms(base: type, norms: list[float]) -> Any:
    """A module that sets `grad_norm` at each step, as the code that clips would."""

    class Keeping(base):  # type: ignore[misc]
        grad_norm: Tensor | None = None

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.grad_norm = torch.tensor(norms[self.trainer.global_step])

    return Keeping()


def test_the_computed_norm_is_the_one_before_clipping(stranger, make_trainer, read_column) -> None:
    module = stranger()
    with torch.no_grad():
        module.layer.weight.fill_(1.0)
        module.layer.bias.zero_()
    # loss = (w.1 + b)^2 with w.1 = 4: every one of the 5 gradients is 2 * 4 = 8, norm 8 * sqrt(5)
    make_trainer(callbacks=[GradNormMonitor()], max_steps=1, gradient_clip_val=0.5).fit(module)
    assert read_column("grad/norm") == [pytest.approx(8 * 5**0.5, rel=1e-6)]


def test_a_module_without_norms_gets_no_clipped_fraction(stranger, make_trainer, tmp_path) -> None:
    make_trainer(callbacks=[GradNormMonitor()], gradient_clip_val=0.5).fit(stranger())
    assert "grad/clipped_fraction" not in (tmp_path / "run" / "metrics.csv").read_text()


def test_two_of_four_steps_above_the_limit_are_a_half(stranger, make_trainer, read_column) -> None:
    norms = [2.0, 0.5, 3.0, 1.0, 0.1, 0.2, 9.0, 0.3]
    trainer = make_trainer(
        callbacks=[GradNormMonitor()], gradient_clip_val=1.0, log_every_n_steps=4
    )
    trainer.fit(keeping_norms(stranger, norms))
    assert read_column("grad/norm") == [1.0, pytest.approx(0.3)]
    assert read_column("grad/clipped_fraction") == [0.5, 0.25]


@pytest.mark.parametrize(
    "clipping", [{}, {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}]
)
def test_there_is_no_clipped_fraction_without_clipping_by_norm(
    stranger, make_trainer, tmp_path, clipping
) -> None:
    make_trainer(callbacks=[GradNormMonitor()], **clipping).fit(keeping_norms(stranger, [2.0] * 8))
    text = (tmp_path / "run" / "metrics.csv").read_text()
    assert "grad/norm" in text
    assert "grad/clipped_fraction" not in text


def test_nothing_is_computed_off_a_logged_step(stranger, make_trainer, monkeypatch) -> None:
    calls = []
    compute = torch.nn.utils.get_total_norm
    monkeypatch.setattr(
        torch.nn.utils, "get_total_norm", lambda grads: calls.append(1) or compute(grads)
    )
    make_trainer(callbacks=[GradNormMonitor()], log_every_n_steps=4).fit(stranger())
    assert len(calls) == 2  # steps 4 and 8


def test_a_method_called_grad_norm_is_no_norm(stranger, make_trainer, read_column) -> None:
    class Old(stranger):  # type: ignore[misc, valid-type]
        def grad_norm(self) -> dict[str, float]:
            return {}

    make_trainer(callbacks=[GradNormMonitor()], max_steps=2).fit(Old())
    assert len(read_column("grad/norm")) == 2


def test_counts_survive_a_checkpoint_between_two_rows(stranger, make_trainer, tmp_path) -> None:
    first = GradNormMonitor()
    trainer: Trainer = make_trainer(
        callbacks=[first], gradient_clip_val=1.0, log_every_n_steps=4, max_steps=7
    )
    trainer.fit(keeping_norms(stranger, [2.0] * 5 + [0.5] * 2))
    assert first.state_dict() | {"trend": None} == {"num_steps": 3, "num_clipped": 1, "trend": None}
    second = GradNormMonitor()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
