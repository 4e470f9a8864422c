"""Duration and price of a planned run, including validation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipes.config.traits import get_eval_samples
from recipes.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """A run in samples and hours.

    Attributes:
        steps: Optimizer steps.
        samples: Consumed in them.
        tokens: Consumed in them; None: the samples are no text.
        evaluations: Validations.
        step_seconds: Of an optimizer step; None: unknown.
        eval_seconds: Of one validation; None: unknown, or its size is.
        hours: Of the run, validations included; None: unknown.
        eval_fraction: Of the hours that validations take; None: unknown.
        tokens_per_second: Of all devices while training; None: unknown.
        mfu: By PaLM's count; None: unknown.
        dollars: Of the run; None: no price is known.
    """

    steps: int
    samples: int
    tokens: int | None
    evaluations: int
    step_seconds: float | None = None
    eval_seconds: float | None = None
    hours: float | None = None
    eval_fraction: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    dollars: float | None = None


def measure_run(
    plan: Plan,
    config: Mapping[str, Any],
    *,
    peak_tflops: float | None,
    expect_mfu: float | None,
    dollars_per_hour: float | None,
) -> RunLength:
    """Return the duration and price of a run.

    Args:
        plan: Of the run.
        config: Of the run.
        peak_tflops: Dense peak of a device for its arithmetic; None: unknown.
        expect_mfu: Replaces the estimated time of a step; None: the estimate.
        dollars_per_hour: Of one device; None: unknown.
    """
    steps, batch = int(config["trainer"]["max_steps"]), plan.accumulation.global_batch_size
    seq_len = config["seq_len"]
    length = RunLength(
        steps=steps,
        samples=steps * batch,
        tokens=None if seq_len is None else steps * batch * int(seq_len),
        evaluations=-(-steps // int(config["eval_every"])),
    )
    flops_per_second = None if peak_tflops is None else peak_tflops * 1e12 * plan.num_ranks
    seconds = None if plan.times is None else plan.times.step_seconds
    if expect_mfu is not None and plan.flops is not None and flops_per_second is not None:
        seconds = plan.flops.palm * batch / (expect_mfu * flops_per_second)
    if seconds is None:
        return length
    eval_seconds = None
    eval_samples = get_eval_samples(config)
    if eval_samples is not None and plan.times is not None:
        share = -(-eval_samples // plan.mesh.data_size)
        eval_seconds = -(-share // plan.accumulation.micro_batch_size) * plan.times.forward_seconds
    training = steps * seconds
    validating = length.evaluations * (eval_seconds or 0.0)
    hours = (training + validating) / 3600
    known = plan.flops is not None and flops_per_second is not None
    return replace(
        length,
        step_seconds=seconds,
        eval_seconds=eval_seconds,
        hours=hours,
        eval_fraction=None if eval_seconds is None else validating / (training + validating),
        tokens_per_second=None if seq_len is None else batch * int(seq_len) / seconds,
        mfu=plan.flops.palm * batch / seconds / flops_per_second if known else None,  # type: ignore[union-attr,operator]
        dollars=None if dollars_per_hour is None else hours * plan.num_ranks * dollars_per_hour,
    )
