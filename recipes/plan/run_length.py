"""Duration and price of a planned run, including validation."""

from dataclasses import dataclass, replace

from recipes.config.resolved import ResolvedRun
from recipes.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Length, duration and price of a run.

    Attributes:
        steps: Optimizer steps.
        samples: Samples consumed.
        tokens: Tokens consumed; None: the samples are not text, or are padded, and how much is known only to the run.
        evaluations: Validation runs.
        step_seconds: Seconds per optimizer step; None: unknown.
        eval_seconds: Seconds per validation; None: unknown.
        hours: Duration including validation; None: unknown.
        eval_fraction: Fraction of the duration spent on validation; None: unknown.
        tokens_per_second: Training throughput of all devices; None: unknown.
        mfu: Model FLOPs utilization, counted as in PaLM; None: unknown.
        dollars: Price of the run; None: unknown.
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
    resolved: ResolvedRun,
    *,
    peak_tflops: float | None,
    expect_mfu: float | None,
    dollars_per_hour: float | None,
) -> RunLength:
    """Return the duration and price of a run.

    Args:
        plan: Plan of the run.
        resolved: The run.
        peak_tflops: Dense peak of one device in the run's arithmetic; None: unknown.
        expect_mfu: MFU to assume instead of the estimated step time; None: use the estimate.
        dollars_per_hour: Price per device; None: unknown.
    """
    steps, batch = resolved.max_steps, plan.accumulation.global_batch_size
    num_tokens = resolved.tokens_per_sample
    length = RunLength(
        steps=steps,
        samples=steps * batch,
        tokens=None if num_tokens is None else steps * batch * num_tokens,
        evaluations=-(-steps // resolved.eval_every),
    )
    flops_per_second = None if peak_tflops is None else peak_tflops * 1e12 * plan.num_ranks
    seconds = None if plan.times is None else plan.times.step_seconds
    if expect_mfu is not None and plan.flops is not None and flops_per_second is not None:
        seconds = plan.flops.palm * batch / (expect_mfu * flops_per_second)
    if seconds is None:
        return length
    eval_seconds = None
    eval_samples = resolved.eval_samples
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
        tokens_per_second=None if num_tokens is None else batch * num_tokens / seconds,
        mfu=plan.flops.palm * batch / seconds / flops_per_second if known else None,  # type: ignore[union-attr,operator]
        dollars=None if dollars_per_hour is None else hours * plan.num_ranks * dollars_per_hour,
    )
