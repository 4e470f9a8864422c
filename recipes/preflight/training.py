"""Checks by short training runs: accumulation, precision, overfitting one batch, loader speed, a checkpoint."""

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from recipes.build import Run
from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.writer import CheckpointWriter
from recipes.config.resolved import ResolvedRun
from recipes.data.draws import has_draws
from recipes.engine import get_engine
from recipes.loss import logged_by_count
from recipes.numerics.collectives import gather_objects
from recipes.preflight.data import digest
from recipes.preflight.result import Result, judge
from recipes.runtime.world import num_cores
from recipes.trial.steps import LossRecorder, sized, take_steps

# relative differences explained by rounding: order of summation, products with 4, 8 and 11 bits; emulated float8
# differs by 0.004 in the first step of gpt2_nano
_SAME = {"32-true": 1e-3, "tf32": 0.02, "16-mixed": 0.02, "bf16-mixed": 0.03, "bf16-true": 0.06, "fp8-mixed": 0.06}
_CONSTANT = {"_target_": "recipes.scheduler.constant", "_partial_": True, "warmup_steps": 0}


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """The first step of a trial.

    Attributes:
        loss: Loss over all ranks.
        norm: Gradient norm; inf if float16 overflowed.
    """

    loss: float
    norm: float


class InEvaluationMode(Callback):
    """Disables dropout and batch statistics, so that gradients do not depend on the split into micro-batches."""

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.model.eval()


def take_first_step(resolved: ResolvedRun) -> FirstStep:
    """Take one step without dropout."""
    recorder = LossRecorder()
    run = take_steps(resolved, num_steps=1, callbacks=[InEvaluationMode(), recorder])
    norm = get_engine(run.trainer).grad_norm
    return FirstStep(loss=recorder.losses[0], norm=math.inf if norm is None else float(norm))


def check_accumulation(resolved: ResolvedRun, *, micro_batch_size: int) -> Result:
    """Compare a step in one micro-batch with the same samples in two."""
    half = max(micro_batch_size // 2, 1)
    whole, split = (
        take_first_step(sized(resolved, micro_batch_size=size, num_micro_batches=2 * half // size))
        for size in (2 * half, half)
    )
    found = (
        f"loss {whole.loss:.6g} and {split.loss:.6g}, gradient norm {whole.norm:.6g} and {split.norm:.6g},"
        f" in 1 and 2 micro-batches of the same {2 * half * resolved.num_data_ranks} samples"
    )
    passes = _agree(whole, split, _SAME[resolved.precision])
    remedy = "the loss or the gradient is not divided by all targets of the step: with more micro-batches it grows"
    return judge("accumulation equals one batch", found, passes=passes, remedy=remedy)


def check_precision(resolved: ResolvedRun, *, micro_batch_size: int) -> Result:
    """Compare a step in the run's precision with the same step in float32."""
    name = "low precision agrees with float32"
    precision = resolved.precision
    if precision == "32-true":
        return Result(check=name, status="skip", found="the run is in float32")
    small = sized(resolved, micro_batch_size=max(micro_batch_size // 2, 1), num_micro_batches=1)
    low, full = take_first_step(small), take_first_step(small.with_settings({"precision.name": "32-true"}))
    found = (
        f"loss {low.loss:.5g} in {precision}, {full.loss:.5g} in float32; gradient norm {low.norm:.4g}, {full.norm:.4g}"
    )
    if not math.isfinite(low.norm) and precision == "16-mixed":
        found += " (overflow at the first loss scale, which then halves)"
        low = FirstStep(loss=low.loss, norm=full.norm)
    passes, fails = _agree(low, full, _SAME[precision]), not _agree(low, full, 4 * _SAME[precision])
    remedy = "a norm, a softmax or the loss is computed in low precision; precision=32-true until it is found"
    return judge(name, found, passes=passes, fails=fails, remedy=remedy)


def _agree(first: FirstStep, second: FirstStep, bound: float) -> bool:
    return all(
        math.isclose(a, b, rel_tol=share)
        for a, b, share in ((first.loss, second.loss, bound / 4), (first.norm, second.norm, bound))
    )


def overfit(resolved: ResolvedRun, *, num_steps: int, micro_batch_size: int) -> tuple[Result, float]:
    """Train on one micro-batch with the run's optimizer at its peak learning rate; return also seconds per step."""
    small = sized(resolved, micro_batch_size=micro_batch_size, num_micro_batches=1)
    small = small.with_settings({"scheduler": _CONSTANT, "loader.overfit_batches": 1})
    recorder, clock = LossRecorder(), _Clock()
    take_steps(small, num_steps=num_steps, callbacks=[recorder, clock])
    first, last = recorder.losses[0], min(recorder.losses[-5:])
    found = f"loss {first:.3f} to {last:.3f} in {num_steps} steps at optimizer.lr={resolved.lr:g}"
    remedy = "it learns slowly: mode.overfit_steps=<more>, or mode=lr_find"
    fails = not last <= 0.95 * first  # NaN too
    if fails:
        remedy = "it does not learn even what it sees again and again: mode=lr_find, then the loss and the optimizer"
    result = judge("one batch can be memorized", found, passes=last <= 0.7 * first, fails=fails, remedy=remedy)
    return result, clock.seconds


class _Clock(Callback):
    """Measures the median step time, without data loading and the first steps."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: list[float] = []

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._began = self._now(trainer)

    @override
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._seconds.append(self._now(trainer) - self._began)

    @staticmethod
    def _now(trainer: lightning.Trainer) -> float:
        if get_engine(trainer).root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def seconds(self) -> float:
        steps = sorted(self._seconds[2:])
        return steps[len(steps) // 2] if steps else math.nan


def draw(run: Run, *, num_batches: int) -> tuple[float, list[bytes]]:
    """Read the next micro-batches of the training stream, as training would. Collective.

    Returns:
        Seconds per micro-batch of a rank, the slowest rank's median; digests of the inputs of its samples, without what
        is drawn for them, over all ranks.
    """
    loader, dataset = run.data.train_dataloader(), run.data.source.train()
    stream, places = iter(loader), iter(loader.make_sampler())
    seconds, own = [], []
    for _ in range(num_batches):
        began = time.perf_counter()
        batch = next(stream)
        seconds.append(time.perf_counter() - began)
        if has_draws(dataset):  # equal samples are drawn differently
            samples = [dataset[index] for index, _ in next(places)]
            own += [digest(sample["inputs"], images=sample.get("images")) for sample in samples]
            continue
        none = [None] * len(batch["inputs"])
        lengths, images = batch.get("num_inputs", none), none
        if "num_images" in batch:  # one after the other, and one of zeros in the place of none
            numbers = batch["num_images"].tolist()
            images = batch["images"][: sum(numbers)].split(numbers)
        own += [digest(*sample) for sample in zip(batch["inputs"], lengths, images, strict=True)]
    own_part = (sorted(seconds)[num_batches // 2], get_engine(run.trainer).data_rank, own)
    parts = gather_objects(own_part)
    times = [part[0] for part in parts]
    digests = dict(part[1:] for part in parts).values()  # ranks that divide matrices, tokens or layers have the same
    # in the order of the stream: sample by sample over the ranks
    return max(times), [each for same_place in zip(*digests, strict=True) for each in same_place]


def check_loader(seconds: float, *, step_seconds: float, num_workers: int | None) -> Result:
    """Compare the time of a micro-batch from the loader with that of training on it.

    Args:
        seconds: Loading time of a micro-batch.
        step_seconds: Time of a step with one micro-batch.
        num_workers: Configured number of workers.
    """
    name = "loading is faster than training"
    found = f"{1e3 * seconds:.2f} ms per micro-batch, and {1e3 * step_seconds:.2f} ms to train on it"
    if math.isnan(step_seconds):
        return Result(check=name, status="skip", found=found)
    passes = seconds <= 0.5 * step_seconds or (seconds <= step_seconds and num_workers != 0)
    remedy = f"more loader processes, loader.num_workers={num_cores()}, or data that needs less work per sample"
    return judge(name, found, passes=passes, fails=seconds > 4 * step_seconds, remedy=remedy)


class LossAfterStep(Callback):
    """Evaluates a micro-batch: the first one, after the first step, or a given one before it.

    Args:
        batch: Micro-batch to evaluate before the first step; None evaluates the first one after the step.
        save_to: Folder for a checkpoint after that step; None saves none.

    Attributes:
        batch: The micro-batch, on the host.
        loss: Its loss, of this rank.
        fault: Why the checkpoint was not written; None: it was.
    """

    def __init__(self, batch: Any = None, save_to: Path | None = None) -> None:
        self.batch = batch
        self.loss = math.nan
        self.fault: str | None = None
        self._save_to = save_to
        self._is_given = batch is not None

    @override
    def on_fit_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if self._save_to is not None:
            _get_writer(trainer).connect()

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._is_given and math.isnan(self.loss):
            self._evaluate(trainer, pl_module)
        elif self.batch is None:
            self.batch = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}

    @override
    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *_: Any) -> None:
        if self._save_to is not None and trainer.global_step == 1 and math.isnan(self.loss):
            pl_module.share_statistics()  # as before every save: each rank has those of its own samples
            self._evaluate(trainer, pl_module)
            trainer.save_checkpoint(self._save_to, weights_only=False)
            outcome = _get_writer(trainer).poll(wait=True)
            assert outcome is not None, "a save has just begun"
            self.fault = None if outcome.is_valid else outcome.error or outcome.rejected

    def _evaluate(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        device = pl_module.device
        batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in self.batch.items()}
        pl_module.model.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            terms = pl_module.loss(pl_module.outputs(batch), batch)
        pl_module.model.train()
        self.loss = float(sum(logged_by_count(terms).values()))


def _get_writer(trainer: lightning.Trainer) -> CheckpointWriter:
    io = get_engine(trainer).checkpoint_io
    assert isinstance(io, FolderCheckpointIO), "build gives every strategy one"
    return io.writer


def check_checkpoint(resolved: ResolvedRun, *, micro_batch_size: int) -> Result:
    """Save after a step, rebuild everything from the checkpoint, and compare the loss on the same samples."""
    name = "a checkpoint restores the loss"
    small = sized(resolved, micro_batch_size=micro_batch_size, num_micro_batches=1)
    with tempfile.TemporaryDirectory(prefix="recipes_preflight_") as own:
        # named as in a run: a folder of checkpoints within a run's folder
        checkpoint = Path(gather_objects(own)[0]) / "checkpoints" / "step_0000001.ckpt"
        saved = LossAfterStep(save_to=checkpoint)
        take_steps(small, num_steps=1, callbacks=[saved])
        if saved.fault is not None:
            remedy = "the temporary folder is full or cannot be written to: TMPDIR=<a folder on a larger disk>"
            return Result(check=name, status="warn", found=f"it was not written: {saved.fault}", remedy=remedy)
        loaded = LossAfterStep(batch=saved.batch)
        take_steps(small.with_settings({"resume": str(checkpoint)}), num_steps=1, callbacks=[loaded])
        if dist.is_initialized():
            dist.barrier()  # rank 0's folder is the one that is read
    of_what = "summed over the targets of a micro-batch"
    found = f"{saved.loss:.7g}, {of_what}, before it was saved; {loaded.loss:.7g} once it was loaded"
    remedy = (
        "the loss depends on something that no checkpoint holds: a buffer that is not persistent, a plain attribute"
    )
    close = math.isclose(saved.loss, loaded.loss, rel_tol=1e-6)  # another kernel for the same product
    return judge(name, found, passes=saved.loss == loaded.loss, fails=not close, remedy=remedy)
