"""What is about to be trained, in a few lines. Free."""

from collections.abc import Iterator
from pathlib import Path

from recipes.build import Run
from recipes.model.init import unsharded_shape


def header(run: Run, *, resumed_from: Path | None) -> Iterator[str]:
    """What is trained, on what, in which portions: three lines before the first step."""
    trainer, plan = run.trainer, run.accumulation
    num_parameters = sum(unsharded_shape(weight).numel() for weight in run.task.parameters())
    ranks = trainer.world_size
    devices = str(run.task.device) if ranks == 1 else f"{ranks} ranks of {run.task.device.type}"
    where = f"{devices}, {run.precision.name}, {type(trainer.strategy).__name__}"
    yield f"model: {run.task.model_name}, {num_parameters:,} parameters on {where}"
    num_samples = trainer.max_steps * plan.global_batch_size
    epochs = num_samples / len(run.data.source.train())
    passes = "1 pass" if plan.num_micro_batches == 1 else f"{plan.num_micro_batches} passes"
    yield (
        f"batch: {plan.global_batch_size} samples a step in {passes};"
        f" {trainer.max_steps:,} steps are {num_samples:,} samples, {epochs:.3g} epochs"
    )
    if run.precision.scales_loss and run.task.device.type == "cpu":
        yield "float16 on a CPU is emulated, some ten times slower than precision=bf16-mixed"
    if resumed_from is not None:
        yield f"resumed from {resumed_from} at step {trainer.global_step}"
