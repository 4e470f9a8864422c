"""A step that is not finite is skipped only if its gradients still are not when the optimizer begins.

Each run here handles its own NaN or inf, and trains without the callback: with it, it has the same weights to the bit.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from callbacks import LossSpikeRollback

STEPS = 160
DATA: DataLoader[Any] = DataLoader(range(STEPS))  # type: ignore[arg-type]


class Linear(LightningModule):
    """Fits noise; subclasses add something that is not finite every seventh step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.random = torch.Generator().manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def loss(self) -> Tensor:
        return self.layer(torch.randn(8, 4, generator=self.random)).sub(1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.damage(self.loss(), batch_idx % 7 == 3)

    def damage(self, loss: Tensor, now: bool) -> Tensor:
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def replace_nan(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


class NanGradient(Linear):
    def damage(self, loss: Tensor, now: bool) -> Tensor:
        return loss * torch.nan if now else loss


class ReplacedByTheModule(NanGradient):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.replace_nan()


class ReplacedWhileClipping(NanGradient):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.replace_nan()


class ClippedByValue(Linear):
    def damage(self, loss: Tensor, now: bool) -> Tensor:
        return loss + self.layer.bias.sub(self.layer.bias.detach()).sqrt().sum() if now else loss


class NanInTheLossAlone(Linear):
    def damage(self, loss: Tensor, now: bool) -> Tensor:
        return loss + torch.nan if now else loss


class Huge(Linear):
    """The squares of its gradients overflow float32, and so does its loss."""

    def damage(self, loss: Tensor, now: bool) -> Tensor:
        return loss * 1e30

    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters(), lr=0.01)


class ShapedLoss(Linear):
    def damage(self, loss: Tensor, now: bool) -> Tensor:
        return loss[None]


class Sparse(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.EmbeddingBag(50, 1, sparse=True)

    def loss(self) -> Tensor:
        tokens = torch.randint(50, (8, 3), generator=self.random)
        return self.layer(tokens).sub(1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Backtracking(torch.optim.Optimizer):
    """Gradient descent that halves a step until the loss is a number that has not risen."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 64.0})

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        loss = closure()
        start = [(parameter.detach().clone(), parameter.grad.clone()) for parameter in parameters]
        size = self.param_groups[0]["lr"]
        while True:
            for parameter, (value, gradient) in zip(parameters, start, strict=True):
                parameter.data.copy_(value - size * gradient)
            tried = closure()
            assert all(parameter.grad is not None for parameter in parameters), "of the weights that were tried"
            if bool(tried <= loss) or size < 1e-4:
                return loss
            size /= 2


class LineSearch(Linear):
    """A logarithm that is NaN at weights which the line search tries and rejects."""

    def loss(self) -> Tensor:
        x = torch.linspace(0.5, 1.5, 32).view(8, 4)
        positive = self.layer(x)
        return (positive - positive.log()).mean()

    def configure_optimizers(self) -> Any:
        self.layer.weight.data.fill_(0.05)
        self.layer.bias.data.fill_(0.05)
        return Backtracking(self.parameters())


class LazyBuffers(Linear):
    """Has buffers without values until its first batch, and a large one that shares a single value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm1d(affine=False)
        self.register_buffer("mask", torch.ones(1).expand(2**40))

    def loss(self) -> Tensor:
        return self.layer(self.norm(torch.randn(8, 4, generator=self.random))).sub(1).square().mean()


class NotTorchs:
    """An optimizer that has the members which Lightning asks for, and no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        for name in ("param_groups", "defaults", "state", "state_dict", "load_state_dict", "zero_grad"):
            setattr(self, name, getattr(inner, name))
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class WithoutHooks(Linear):
    def configure_optimizers(self) -> Any:
        return NotTorchs(torch.optim.Adam(self.parameters(), lr=0.01))


class SwitchedOffScaler(Linear):
    pass


def train(make_trainer: Callable[..., Any], kind: type[Linear], spikes: LossSpikeRollback | None) -> Tensor:
    module = kind()
    clipping: dict[str, Any] = {}
    if kind is ClippedByValue:
        clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    if kind is SwitchedOffScaler:
        clipping = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))]}
    callbacks = [] if spikes is None else [spikes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(callbacks=callbacks, max_steps=STEPS, logger=False, **clipping).fit(module, DATA)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        *((kind, "rollback") for kind in (ReplacedByTheModule, NanInTheLossAlone, ShapedLoss, Sparse, LineSearch)),
        *((kind, "warn") for kind in (ReplacedWhileClipping, LineSearch)),
        *((kind, "warn") for kind in (LazyBuffers, WithoutHooks, SwitchedOffScaler)),
        # an infinite norm is above any limit, which `rollback` sets and `warn` does not
        (ClippedByValue, "warn"),
    ],
)
def test_a_run_that_handles_its_own_nan_is_that_without_the_callback(
    make_trainer: Callable[..., Any], kind: type[Linear], action: Any
) -> None:
    expected = train(make_trainer, kind, None)
    assert bool(expected.isfinite().all())
    spikes = LossSpikeRollback(action=action)
    assert torch.equal(train(make_trainer, kind, spikes), expected)
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 0}


def test_gradients_whose_squares_overflow_are_finite_and_reported_once(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(make_trainer, Huge, None)
    with caplog.at_level("WARNING", "lightning_recipes"):
        assert torch.equal(train(make_trainer, Huge, LossSpikeRollback()), expected)
    lines = [line for line in caplog.messages if line.startswith("Step ")]
    assert len(lines) <= 2
    assert "its gradients are finite, so the step is applied" in lines[0]


def test_what_nobody_replaces_is_skipped(make_trainer: Callable[..., Any]) -> None:
    spikes = LossSpikeRollback()
    assert bool(train(make_trainer, NanGradient, spikes).isfinite().all())
    assert spikes.summary()["skipped_steps"] == sum(step % 7 == 3 for step in range(STEPS))


def test_a_batch_that_cannot_be_pickled_costs_its_dump_alone(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Outlier(Linear):
        def damage(self, loss: Tensor, now: bool) -> Tensor:
            return loss * 1e4 if self.global_step == 100 else loss

    class Locks(Dataset[Any]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            return threading.Lock()

    module = Outlier()
    trainer = make_trainer(callbacks=[LossSpikeRollback()], max_steps=STEPS)
    with caplog.at_level("WARNING", "lightning_recipes"):
        trainer.fit(module, DataLoader(Locks(), collate_fn=lambda locks: locks[0]))
    assert trainer.global_step == STEPS
    assert any("could not be written: TypeError: cannot pickle" in line for line in caplog.messages)
