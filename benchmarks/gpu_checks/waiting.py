"""Time that training waits: none at a skipped step, and almost none at a checkpoint."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from gpu_checks.callbacks import SyncRecorder, WaitsForSaves
from gpu_checks.check import Outcome, Settings, Skip, judge
from gpu_checks.rank_cases import PARITY
from gpu_checks.runs import QUIET, TINY_GPT2, fit_here
from recipes.run_folder import EVENTS_FILE, read_json_lines

assert PARITY.is_dir()  # makes tests/ importable

from faults import FaultAt  # noqa: E402

_LOG_EVERY = 10
_FIRST, _LAST = 12, 19  # no row, snapshot, validation or save is due
_FAULT = 15
_LARGEST_STALL = 0.25  # fraction of the time that a synchronous save takes


def spike_skip_without_sync(settings: Settings) -> Outcome:
    """Record every wait for the GPU in steps without a metric row, one of which is skipped because of a NaN.

    Raises:
        Skip: There is no GPU to wait for.
    """
    if settings.accelerator == "cpu":
        raise Skip("the host never waits for a CPU: CUDA alone reports synchronizations")
    return record_skip(settings, set_mode=torch.cuda.set_sync_debug_mode)


def record_skip(settings: Settings, *, set_mode: Callable[[str], None]) -> Outcome:
    """Train with the default callbacks and a NaN in step 15; record waits in steps 12 to 19.

    Args:
        settings: Settings of the check.
        set_mode: Function with the signature of `torch.cuda.set_sync_debug_mode`.
    """
    recorder = SyncRecorder(first_step=_FIRST, last_step=_LAST, set_mode=set_mode)
    # `max_dumps=0`: dumping a spike reads the batch, a deliberate wait
    overrides = [*TINY_GPT2, *QUIET, *settings.on_one_device, "precision=bf16-mixed", "global_batch_size=8"]
    overrides += [f"log_every={_LOG_EVERY}", "trainer.max_steps=24", "callbacks.loss_spike.max_dumps=0"]
    run = fit_here(settings, "run", overrides, [recorder, FaultAt(kind="nan_batch", step=_FAULT - 1)])
    skips = [event["step"] for event in read_json_lines(run.folder / EVENTS_FILE) if event["event"] == "skip"]
    waits = {wait: recorder.waits.count(wait) for wait in dict.fromkeys(recorder.waits)}
    failures = [f"the host waits for the GPU {count} times at {wait}" for wait, count in waits.items()]
    if skips != [_FAULT]:
        failures.append(f"skipped steps {skips}, not [{_FAULT}]")
    if recorder.num_steps != _LAST - _FIRST + 1:
        failures.append(f"recorded {recorder.num_steps} steps, not {_LAST - _FIRST + 1}")
    headline = f"{len(recorder.waits)} waits in {recorder.num_steps} steps"
    return judge(failures, headline=headline, figures={"waits": waits, "skipped_steps": skips})


def asynchronous_save(settings: Settings) -> Outcome:
    """Compare how long asynchronous and synchronous saves of GPT-2 124M stall training."""
    every, num_saves = (2, 3) if settings.is_tiny else (10, 4)
    model = TINY_GPT2 if settings.is_tiny else ["model=gpt2"]
    overrides = [*model, "data=random_tokens", *settings.on_one_device, "precision=bf16-mixed", "global_batch_size=8"]
    overrides += [
        "eval_every=1000000",
        "eval_samples=1",
        f"trainer.max_steps={every * num_saves + 1}",
        f"save_every={every}",
        "checkpoint.keep_last=1",
    ]
    overrides += ["callbacks=[grad_norm]", "log_every=10"]
    figures: dict[str, Any] = {}
    for name, typed in (("asynchronous", "true"), ("synchronous", "false")):
        callbacks = [WaitsForSaves(save_every=every)]
        run = fit_here(settings, name, [*overrides, f"checkpoint.async_save={typed}"], callbacks)
        saves = [event for event in read_json_lines(run.folder / EVENTS_FILE) if event["event"] == "checkpoint"]
        first, *others = [save for save in saves if save["step"] % every == 0]
        figures[name] = {
            "stall_seconds": median(save["stall_seconds"] for save in others),
            "stall_seconds_of_the_first": first["stall_seconds"],  # also allocates pinned memory
            "seconds_until_verified": median(save["seconds"] for save in others),
            "checkpoint_gib": round(first["bytes"] / 2**30, 3),
            "num_saves": 1 + len(others),
        }
    stall, whole = (figures[name]["stall_seconds"] for name in ("asynchronous", "synchronous"))
    failures = [
        f"{name}: {figures[name]['num_saves']} complete saves, not {num_saves}"
        for name in figures
        if figures[name]["num_saves"] != num_saves
    ]
    if not settings.is_tiny and stall > _LARGEST_STALL * whole:
        failures.append(f"training waits {stall:.3f} s for a save that takes {whole:.3f} s")
    size = figures["asynchronous"]["checkpoint_gib"]
    headline = f"{1000 * stall:.0f} ms, synchronous {1000 * whole:.0f} ms, {size:.2f} GiB"
    return judge(failures, headline=headline, figures=figures)
