"""Find the largest micro-batch that fits at the same global batch, by trial steps in separate processes."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from recipes.config.resolved import ResolvedRun
from recipes.config.traits import declare_mode
from recipes.engine import get_engine
from recipes.entry.spawn import ProcessExit, spawn_ranks
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.mode.about import describe_command
from recipes.plan.advice import Planner
from recipes.plan.assumptions import Assumptions
from recipes.plan.hardware import GIB, find_cluster
from recipes.run_folder import claim_output, has_keys, is_page
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.trial.steps import reject_resume, sized, take_steps

# Measure a rank's peak memory in one optimizer step, from the GPU's allocator or torch's profiler on a CPU.

_MARK = "measured step"


class PeakMemory(Callback):
    """Measures one optimizer step with all its micro-batches. Enter it before the run is built.

    On a GPU this is the allocator's reserved memory, including fragmentation. On a CPU torch's profiler records every
    tensor from the start, which costs time and a file that grows with the run.

    Args:
        step: Number of the step, from 0; the first creates the optimizer's state.

    Attributes:
        peak_bytes: Peak of this rank; available when the context ends.
        seconds: Duration of the step.
    """

    def __init__(self, step: int) -> None:
        self.peak_bytes = 0
        self.seconds = 0.0
        self._step = step
        self._mark: Any = None
        self._began = 0.0
        self._profiler: Any = None

    def __enter__(self) -> "PeakMemory":
        if not torch.cuda.is_available():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints two lines
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is None:
            self.peak_bytes = torch.cuda.max_memory_reserved()
            return
        self._profiler.__exit__(*error)
        if error[0] is None:
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(trace))
                self.peak_bytes = peak_bytes(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step and self._mark is None:
            _wait()
            self._began = time.perf_counter()
            self._mark = record_function(_MARK)
            self._mark.__enter__()

    @override
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step + 1 and self._mark is not None:
            _wait()
            self.seconds = time.perf_counter() - self._began
            self._mark.__exit__(None, None, None)
            self._mark, self._step = None, -1


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the most bytes that were allocated at a time during the marked step, of those the profile saw allocated.

    The profile's own totals are no use: what another thread frees is missing from them. An address that is given out
    again was free.

    Args:
        events: Of a chrome trace.
    """
    events = list(events)
    [step] = [event for event in events if event.get("name") == _MARK and event.get("cat") == "user_annotation"]
    live: dict[int, int] = {}
    total = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]:
            most = max(most, total)
    return most


_TRY = "recipes.mode.batch_find.try_size"
_STEPS = 3  # the first creates the optimizer's state, the second is the first at full memory, the third is measured
_MICRO_BATCHES = 2  # per trial step: from the second on, gradients exist while activations are created


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of trying one size.

    Attributes:
        size: Samples per device per forward pass.
        peak_bytes: Peak memory of the fullest rank; None if it ran out of memory.
        samples_per_second: Throughput of all ranks; None if it ran out of memory.
        fits: Whether the peak is within the limit minus the margin.
        failure: Error other than out of memory.
    """

    size: int
    peak_bytes: int | None = None
    samples_per_second: float | None = None
    fits: bool = False
    failure: ProcessExit | None = None


@declare_mode(reads_data=True)
def batch_find(
    resolved: ResolvedRun, *, margin: Annotated[float, ">= 0, < 1"], path: str | None, write_page: Callable[..., None]
) -> int:
    """Try sizes, starting from the plan's estimate, and print the largest that fits.

    Args:
        resolved: The run.
        margin: Fraction of memory to leave free.
        path: Folder for `batch_find.json` and `batch_find.html`; None only prints.
        write_page: (file, title, lines, figures) -> writes the page; it is also given `about`, of this command.

    Returns:
        The exit code: 0; 71 if not even one sample fits; that of a trial that failed for another reason.

    Raises:
        ConfigError: `path` cannot be written to, the global batch does not divide over the ranks, or the run resumes.
    """
    reject_resume(resolved)
    written = {"batch_find.json": has_keys("micro_batch_size", "tried"), "batch_find.html": is_page}
    folder = None if path is None else claim_output(path, "mode.path", replaces=written)
    trial_run = resolved.with_settings({"mode": {"_target_": _TRY, "_partial_": True, "path": ""}})
    ranks = trial_run.ranks
    sizes = _find_sizes(trial_run)
    assumed: Assumptions = resolved.make("plan")
    cluster = find_cluster(
        "auto", per_node=ranks.per_node, num_nodes=ranks.num_nodes, interconnect=None, memory_gib=assumed.memory_gib
    )
    limit = cluster.memory_bytes * (1 - margin)
    LOGGER.info(
        f"batch_find: {resolved.global_batch_size} sample{'s' if resolved.global_batch_size > 1 else ''} per step"
        f" on {ranks.world_size}"
        f" rank{'s' if ranks.world_size > 1 else ''}, {limit / GIB:.2f} GiB of memory each"
    )
    first = _estimate(trial_run, sizes, Planner(cluster), limit)
    trials: list[Trial] = []
    for trial in search(sizes, first, lambda size: _run_trial(trial_run, size, limit)):
        if trial.failure is not None:
            if trial.failure.report is not None:
                LOGGER.error(trial.failure.report)
            LOGGER.error(f"The trial of micro_batch_size={trial.size} failed for a reason other than memory")
            return trial.failure.exit_code
        trials.append(trial)
        LOGGER.info(_line(trial, limit))
    lines = describe(trials, global_batch_size=resolved.global_batch_size, limit=limit)
    for line in lines:
        LOGGER.info(line)
    if folder is not None:
        _write(folder, trials, lines, partial(write_page, about=describe_command(resolved)))
    return ExitCode.FINISHED if any(trial.fits for trial in trials) else ExitCode.OUT_OF_MEMORY


@declare_mode(takes_steps=True, reads_data=True)
def try_size(resolved: ResolvedRun, *, path: str) -> int:
    """Take a few steps as one rank of a trial; rank 0 writes the peak memory over all ranks and the step time.

    Args:
        resolved: The run with the size to try.
        path: JSON file to write.

    Returns:
        The exit code, 0.
    """
    with PeakMemory(_STEPS - 1) as measured:
        run = take_steps(resolved, num_steps=_STEPS, callbacks=[measured])
    device = "cuda" if get_engine(run.trainer).root_device.type == "cuda" else "cpu"
    worst = torch.tensor([measured.peak_bytes, measured.seconds], dtype=torch.float64, device=device)  # [2]
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    peak, seconds = worst.tolist()
    if run.trainer.is_global_zero:
        write_atomically(Path(path), json.dumps({"peak_bytes": int(peak), "seconds": seconds}))
    return 0


def search(sizes: Sequence[int], first: int, run_trial: Callable[[int], Trial]) -> Iterator[Trial]:
    """Yield trials until a size fits and the next larger one does not.

    Args:
        sizes: Sizes in ascending order.
        first: Index of the first size to try.
        run_trial: Runs a trial of one size.
    """
    trial = run_trial(sizes[first])
    yield trial
    step = 1 if trial.fits else -1
    index = first + step
    while 0 <= index < len(sizes):
        fitted = trial.fits
        trial = run_trial(sizes[index])
        yield trial
        if trial.fits != fitted:
            return
        index += step


def _find_sizes(resolved: ResolvedRun) -> list[int]:
    """Return the micro-batch sizes that divide the samples of a rank."""
    num_ranks = resolved.num_data_ranks
    per_rank, rest = divmod(resolved.global_batch_size, num_ranks)
    if rest or per_rank == 0:
        raise ConfigError(
            f"global_batch_size={resolved.global_batch_size}",
            f"it is not divisible by {num_ranks} ranks",
            f"global_batch_size={max(per_rank, 1) * num_ranks}",
        )
    return [size for size in range(1, per_rank + 1) if per_rank % size == 0]


def _estimate(resolved: ResolvedRun, sizes: Sequence[int], planner: Planner, limit: float) -> int:
    """Return the index of the largest size that fits according to the plan; 0 if none does."""
    low, high = 0, len(sizes)
    while high - low > 1:  # sizes[low] may fit, sizes[high] does not
        middle = (low + high) // 2
        split = {"micro_batch_size": sizes[middle], "trainer.accumulate_grad_batches": None}
        planned = planner.plan(resolved.with_settings(split))
        if planned.peak.total <= limit:
            low = middle
        else:
            high = middle
    return low


def _run_trial(resolved: ResolvedRun, size: int, limit: float) -> Trial:
    """Try a size in new processes."""
    per_rank = resolved.global_batch_size // resolved.num_data_ranks
    with tempfile.TemporaryDirectory(prefix="recipes_trial_") as folder:
        file = Path(folder) / "trial.json"
        count = min(per_rank // size, _MICRO_BATCHES)
        changed = sized(resolved, micro_batch_size=size, num_micro_batches=count)
        result = spawn_ranks(changed.with_settings({"mode.path": str(file)}), resolved.ranks)
        # when host memory runs out, the kernel kills silently
        if result.exit_code == ExitCode.OUT_OF_MEMORY or "SIGKILL" in (result.report or ""):
            return Trial(size=size)
        if result.exit_code != ExitCode.FINISHED:
            return Trial(size=size, failure=result)
        found = json.loads(file.read_text(encoding="utf-8"))
    return Trial(
        size=size,
        peak_bytes=found["peak_bytes"],
        samples_per_second=changed.global_batch_size / found["seconds"],
        fits=found["peak_bytes"] <= limit,
    )


def _line(trial: Trial, limit: float) -> str:
    name = f"  micro_batch_size={trial.size:<6}"
    if trial.peak_bytes is None:
        return f"{name} out of memory"
    verdict = "fits" if trial.fits else "does not fit"
    return f"{name} {trial.peak_bytes / GIB:8.2f} of {limit / GIB:.2f} GiB: {verdict}"


def describe(trials: Sequence[Trial], *, global_batch_size: int, limit: float) -> list[str]:
    """Summarize the trials as lines of text.

    Args:
        trials: Trials in any order.
        global_batch_size: Global batch size of the run.
        limit: Bytes that a rank may use.
    """
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.size)
    if not fitting:
        advice = "the same command with mode=plan shows what saves memory"
        return [f"not even one sample fits into {limit / GIB:.2f} GiB: {advice}"]
    best = fitting[-1]
    assert best.peak_bytes is not None, "it fits"
    lines = [
        f"suggestion: micro_batch_size={best.size}, {best.peak_bytes / GIB:.2f} of {limit / GIB:.2f} GiB;"
        f" global_batch_size={global_batch_size} stays"
    ]
    fastest = max(fitting, key=lambda trial: trial.samples_per_second or 0.0)
    if fastest.size != best.size:
        lines.append(
            f"micro_batch_size={fastest.size} was faster: {fastest.samples_per_second:,.1f} samples/s, not"
            f" {best.samples_per_second:,.1f}; one step each, so measure before you rely on it"
        )
    return lines


def _write(folder: Path, trials: Sequence[Trial], lines: list[str], write_page: Callable[..., None]) -> None:
    ordered = sorted(trials, key=lambda trial: trial.size)
    tried = [
        {
            "micro_batch_size": trial.size,
            "fits": trial.fits,
            "peak_gib": None if trial.peak_bytes is None else round(trial.peak_bytes / GIB, 4),
            "samples_per_second": trial.samples_per_second,
        }
        for trial in ordered
    ]
    fitting = [trial.size for trial in ordered if trial.fits]
    record = {"micro_batch_size": fitting[-1] if fitting else None, "tried": tried}
    write_atomically(folder / "batch_find.json", json.dumps(record, indent=2) + "\n")
    points = [(trial.size, trial.peak_bytes / GIB) for trial in ordered if trial.peak_bytes is not None]
    figure = {"title": "peak memory per rank in GiB, by micro-batch size", "lines": {"peak": points}, "marks": {}}
    page = folder / "batch_find.html"
    write_page(page, "Largest micro-batch", lines, [figure])
    LOGGER.info(str(page))
