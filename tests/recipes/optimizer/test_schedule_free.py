"""Schedule-Free AdamW against its formula, on shards as on one device, and the exchange for a validation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support import TINY, composed_config, read_metrics, resolved
from thread_ranks import LAYOUTS, Net, run_on_threads, train
from torch import nn

from recipes.build import Run, build
from recipes.checkpoint.saver import CheckpointSaver
from recipes.numerics.loss import IGNORE_INDEX, cross_entropy_sum
from recipes.optimizer import hold_averages
from recipes.optimizer.schedule_free import AVERAGE, ScheduleFreeAdamW

BETA1, BETA2, EPS, LR, DECAY = 0.9, 0.95, 1e-8, 1e-2, 0.1


def make(model: nn.Module) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW(model, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)


def test_three_steps_follow_the_formula_of_the_paper() -> None:
    points = [parameter.detach().double() for parameter in Net().parameters()]
    iterates, averages = ([point.clone() for point in points] for _ in range(2))
    seconds = [torch.zeros_like(point) for point in points]
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        for index, (z, x, second) in enumerate(zip(iterates, averages, seconds, strict=True)):
            grad = torch.randn(z.shape, generator=generator).double()
            second.mul_(BETA2).add_(grad.square(), alpha=1 - BETA2)
            direction = grad / ((second / (1 - BETA2**step)).sqrt() + EPS)
            direction += (DECAY if z.ndim >= 2 else 0.0) * points[index]
            z -= LR * direction
            x += (z - x) / step  # equal learning rates: the plain mean of all iterates
            points[index] = (1 - BETA1) * z + BETA1 * x
    found, optimizer = train(make)
    for one, other in zip(found, points, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-6, atol=1e-7)
    in_groups = sorted(averages, key=lambda average: average.ndim < 2)  # matrices, then vectors
    for state, average in zip(optimizer.state.values(), in_groups, strict=True):
        torch.testing.assert_close(state[AVERAGE], average.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_replicas_give_the_bits_of_one_device(layout: str) -> None:
    expected, _ = train(make)
    for found, _ in run_on_threads(lambda rank: train(make, layout)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_validation_sees_the_average_and_leaves_no_trace() -> None:
    model = Net()
    optimizer = make(model)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    averages = [optimizer.state[parameter][AVERAGE].clone() for parameter in model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(weights, averages, strict=True))
    for _ in range(2):
        optimizer.hold_average(True)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), averages, strict=True))
    for _ in range(2):
        optimizer.hold_average(False)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), weights, strict=True))
    kept = [optimizer.state[parameter][AVERAGE] for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(kept, averages, strict=True))


def test_a_step_without_gradients_changes_nothing() -> None:
    expected, _ = train(make, num_steps=1)
    found, _ = train(make, num_steps=2, skips=1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_validation_loss_of_a_run_is_that_of_the_average(tmp_path: Path, text_folder: str) -> None:
    config = composed_config(
        *TINY, f"data.path={text_folder}", "optimizer=schedule_free", "trainer.max_steps=4", "eval_every=4"
    )
    run = build(resolved(config, tmp_path))
    run.trainer.fit(run.task, datamodule=run.data)
    [logged] = [row["val/loss"] for row in read_metrics(tmp_path) if "val/loss" in row]

    @torch.no_grad()
    def validate() -> float:
        batches = list(run.data.val_dataloader())
        losses = [cross_entropy_sum(run.task.outputs(batch), batch["targets"]) for batch in batches]
        return float(sum(losses)) / sum(int((batch["targets"] != IGNORE_INDEX).sum()) for batch in batches)

    at_the_point = validate()
    hold_averages(run.trainer.optimizers, run.task.model, held=True)
    assert validate() == pytest.approx(logged, rel=1e-6)  # float32 sums in another order
    assert at_the_point != pytest.approx(logged, rel=1e-5)


def test_a_parameter_that_is_trained_later_averages_its_own_steps() -> None:
    model = Net()
    optimizer, late = make(model), model.embedding.weight
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None if parameter is late and step < 2 else torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(optimizer.state[late][AVERAGE], optimizer.state[late]["iterate"])
    optimizer.hold_average(True)  # and one that is not trained at all has no state
    assert len(optimizer.state) == len(list(model.parameters()))


class _SavesInValidation(Callback):
    """Saves as a run does that is stopped in a validation."""

    def __init__(self, run: Run) -> None:
        [self.saver] = [each for each in run.trainer.callbacks if isinstance(each, CheckpointSaver)]  # type: ignore[attr-defined]

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.saver._save(trainer, trainer.global_step)


def test_a_checkpoint_of_a_run_that_is_stopped_in_a_validation_holds_the_weights(
    tmp_path: Path, text_folder: str
) -> None:
    more = ["optimizer=schedule_free", "trainer.max_steps=3", "eval_every=3", "micro_batch_size=8", "save_every=3"]
    run = build(resolved(composed_config(*TINY, f"data.path={text_folder}", *more), tmp_path))
    run.trainer.callbacks.insert(0, _SavesInValidation(run))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    saved = run.trainer.strategy.load_checkpoint(tmp_path / "checkpoints/step_0000003.ckpt")
    for name, weight in run.task.named_parameters():
        state = run.trainer.optimizers[0].state[weight]
        found = saved["state_dict"][name].read().view(weight.shape)
        assert torch.equal(found, torch.lerp(state["iterate"], state[AVERAGE], 0.95)), name
        assert not torch.equal(found, state[AVERAGE])
