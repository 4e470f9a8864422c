"""Format a plan, with the duration and price of the run, as lines of text for the console, and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.model.flops import Flops
from recipes.plan.activations import PCIE_BYTES_PER_SECOND
from recipes.plan.communication import Communication
from recipes.plan.memory import Moment
from recipes.plan.plan import GenerationMemory, Plan, gib, size_unit
from recipes.plan.roofline import Rates
from recipes.plan.times import Times
from recipes.plan.trace import CATEGORIES

# Duration and price of a planned run, including validation.


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
        samples_per_second: That of samples, such as images.
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
    samples_per_second: float | None = None
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
    mfu = None
    if plan.flops is not None and flops_per_second is not None:
        mfu = plan.flops.palm * batch / seconds / flops_per_second
    return replace(
        length,
        step_seconds=seconds,
        eval_seconds=eval_seconds,
        hours=hours,
        eval_fraction=None if eval_seconds is None else validating / (training + validating),
        tokens_per_second=None if num_tokens is None else batch * num_tokens / seconds,
        samples_per_second=batch / seconds,
        mfu=mfu,
        dollars=None if dollars_per_hour is None else hours * plan.num_ranks * dollars_per_hour,
    )


_POINTS = 400  # maximum number of points in the memory timeline


def describe_memory(plan: Plan) -> Iterator[str]:
    """Yield the lines about peak memory per rank."""
    moment = plan.peak
    accumulation = plan.accumulation
    samples = "1 sample" if accumulation.global_batch_size == 1 else f"{accumulation.global_batch_size} samples"
    yield (
        f"batch: {samples} per step, in {accumulation.num_micro_batches} micro-batch"
        f"{'es' if accumulation.num_micro_batches > 1 else ''} of {accumulation.micro_batch_size} on each of"
        f" {plan.mesh.data_size} {_name_data_ranks(plan)}"
    )
    yield from _describe_mesh(plan)
    unit, unit_bytes = size_unit(moment.total)
    yield f"peak memory per rank in {unit} ({describe_place(moment)}):"
    shown = {name: moment.held[name] for name in sorted(moment.held, key=_order) if moment.held[name] > 0}
    for name, num_bytes in shown.items():
        yield f"  {name:<17} {num_bytes / unit_bytes:9.2f}"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    total, limit = moment.total / unit_bytes, plan.limit_bytes / unit_bytes
    yield f"  {'total':<17} {total:9.2f}  of {limit:,.2f} usable: {verdict}"
    if plan.not_recorded is not None:
        yield (
            "  without activations and loss: the forward pass needs values, which a plan does not have"
            f" ({plan.not_recorded[:120]})"
        )
    if plan.memory_budget is not None:
        yield (
            f"  assumed: each block keeps {plan.memory_budget:.0%} of the activations that it keeps in eager mode, and"
            " recomputes the rest in proportion; torch's partitioner, which a plan does not run, recomputes less"
        )
    if plan.generation is not None:
        yield _describe_generation(plan.generation, plan.limit_bytes)
    if plan.host:
        unit, unit_bytes = size_unit(min(plan.host.values()))
        parts = ", ".join(f"{name} {num_bytes / unit_bytes:,.2f}" for name, num_bytes in plan.host.items())
        yield f"host memory per rank in {unit}: {parts}"
    if plan.disk_bytes:
        unit, unit_bytes = size_unit(plan.checkpoint_bytes)
        yield (
            f"disk: {plan.checkpoint_bytes / unit_bytes:,.2f} {unit} per checkpoint,"
            f" {plan.disk_bytes / unit_bytes:,.2f} {unit} for all retained checkpoints"
        )


def _describe_generation(memory: GenerationMemory, limit_bytes: int) -> str:
    unit, unit_bytes = size_unit(memory.gathered_bytes)
    size = f"{memory.gathered_bytes / unit_bytes:,.2f} {unit}"
    beside = f"beside {memory.held_bytes / unit_bytes:,.2f} of weights and optimizer state"
    if not memory.gathers_once:
        return f"text generation: gathers each block for every token; the whole weights are {size}, {beside}"
    fits = "" if memory.gathered_bytes + memory.held_bytes <= limit_bytes else ": DOES NOT FIT"
    return f"text generation: gathers the weights once per call, {size} on each rank {beside}{fits}"


def _name_data_ranks(plan: Plan) -> str:
    """Return the name of the units with distinct samples: ranks, or groups of ranks that share samples."""
    size = plan.num_ranks // plan.mesh.data_size
    name = "rank" if size == 1 else "group"
    return f"{name}{'s' if plan.mesh.data_size > 1 else ''}" + (f" of {size} ranks" if size > 1 else "")


def _describe_mesh(plan: Plan) -> Iterator[str]:
    """Yield the rank count along each mesh dimension, unless only samples and weights are sharded."""
    if plan.num_ranks == plan.mesh.data_size and plan.mesh.expert == 1:
        return
    sizes = {"pipeline": plan.pipeline.num_stages} if plan.pipeline.num_stages > 1 else {}
    yield "mesh: " + ", ".join(f"{name} {size}" for name, size in (sizes | plan.mesh.sizes()).items())


def describe_place(moment: Moment) -> str:
    """Return a readable name for a position in a step."""
    direction, _, place = moment.section.partition("/")
    words = {"embedding": "before the first block", "head": "head and loss"}
    where = words.get(place, "blocks" if place else "")
    return ", ".join(part for part in (direction, where) if part)


def describe_time(plan: Plan, length: RunLength, rates: Rates | None) -> Iterator[str]:
    """Yield the lines about the time per step and of the whole run."""
    tokens = "" if length.tokens is None else f", {length.tokens:,} tokens"
    yield f"run: {length.steps:,} steps, {length.samples:,} samples{tokens}, {length.evaluations:,} validations"
    if length.step_seconds is None:
        yield "time: unknown for this device; plan.hardware=measured times its operators"
        return
    speed = f", {length.samples_per_second:,.1f} samples/s"
    if length.tokens_per_second is not None:
        speed = f", {length.tokens_per_second:,.0f} tokens/s"
    mfu = "" if length.mfu is None else f", MFU {length.mfu:.2f}"
    assert length.hours is not None, "the steps have a time"
    yield f"time: {length.step_seconds:.3g} s per step{speed}{mfu}; {_duration(length.hours)} in total"
    if length.eval_fraction is not None:
        yield f"  including at most {length.eval_fraction:.0%} for validations of {length.eval_seconds:.3g} s each"
    else:
        yield "  and validation: eval_samples=null reads the whole split, whose size is known once it is prepared"
    if plan.times is not None:
        yield from _describe_parts(plan, plan.times, rates)
    if length.dollars is not None:
        yield f"price: {f'${length.dollars:,.2f}' if length.dollars >= 0.005 else 'less than a cent'}"


def _duration(hours: float) -> str:
    """Return `0.889 s`, `12.3 min` or `4.56 h`."""
    seconds = 3600 * hours
    number, unit = (seconds, "s") if seconds < 60 else (seconds / 60, "min") if seconds < 3600 else (hours, "h")
    return f"{number:,.3g} {unit}"


def _describe_parts(plan: Plan, times: Times, rates: Rates | None) -> Iterator[str]:
    parts = times.step.of("")
    total = parts.total or 1.0
    shares = ", ".join(
        f"{name} {value / total:.0%}"
        for name, value in (
            ("matrix products", parts.matmul),
            ("convolutions", parts.convolution),
            ("attention", parts.attention),
            ("memory traffic", parts.memory),
            ("waiting for the host", parts.waiting),
        )
        if value > 0
    )
    yield f"  computing: {shares}"
    if times.communication.num_bytes:
        yield from _describe_communication(times.communication)
    if times.bubble is not None:
        yield (
            f"  pipeline: a rank is idle for {times.bubble:.1%} of a step"
            f" ({plan.pipeline.schedule}, {plan.pipeline.num_stages} ranks)"
        )
    if times.transfer is not None:
        moved = times.transfer
        unit, unit_bytes = size_unit(moved.num_bytes)
        yield (
            f"  offload: {moved.num_bytes / unit_bytes:,.2f} {unit} of activations to host memory and back per"
            f" micro-batch, {moved.seconds:.3g} s at {PCIE_BYTES_PER_SECOND / 1e9:.0f} GB/s,"
            f" of which {moved.exposed_seconds:.3g} s not hidden by computation"
        )
    if rates is None:
        yield "  each operator was timed on this machine; the time between operators and waiting for data come on top"
        return
    padded = ", convolutions too with channels padded to 8 and 64" if parts.convolution else ""
    yield (
        f"  assumed: matrix products at {rates.matmul:.0%} of the peak{padded}, attention {rates.attention[0]:.0%} and"
        f" {rates.attention[1]:.0%} over long sequences (half at {rates.attention_keys[0]} and"
        f" {rates.attention_keys[1]} tokens), memory traffic {rates.memory:.0%}; data ready in time;"
        " plan.expect_mfu= overrides this"
    )


def _describe_communication(sent: Communication) -> Iterator[str]:
    """Yield the totals, and a table with a row per mesh dimension if there are several."""
    unit, unit_bytes = size_unit(sent.num_bytes)
    yield (
        f"  communication: {sent.num_bytes / unit_bytes:,.2f} {unit} sent per rank and step, {sent.seconds:.3g} s,"
        f" of which {sent.exposed_seconds:.3g} s not hidden by computation"
    )
    if len(sent.traffic) == 1:
        return
    yield f"    {'dimension':<12} {'ranks':>6} {f'{unit} per step':>12} {'seconds':>9} {'not hidden':>11}"
    for part in sent.traffic:
        yield (
            f"    {part.dimension:<12} {part.num_ranks:>6,} {part.num_bytes / unit_bytes:>12,.2f} {part.seconds:>9.3g}"
            f" {part.exposed_seconds:>11.3g}"
        )


def describe_rules(plan: Plan, resolved: ResolvedRun) -> Iterator[str]:
    """Yield rules of thumb next to the computed values."""
    held = plan.peak.held
    state = sum(held.get(name, 0) for name in ("weights", "gradients", "optimizer", "master weights"))
    rule = 16 * plan.num_parameters
    unit, unit_bytes = size_unit(min(rule, state or rule))
    yield (
        f"rule of thumb: 16 bytes per parameter are {rule / unit_bytes:,.2f} {unit} per copy;"
        f" here {state / unit_bytes:,.2f} per rank"
    )
    model, seq_len = resolved.model, resolved.seq_len
    if seq_len is not None and model.hidden_size is not None and model.num_layers is not None:
        tokens = plan.accumulation.micro_batch_size * seq_len
        rule, kept = 34 * tokens * model.hidden_size * model.num_layers, held.get("activations", 0)
        unit, unit_bytes = size_unit(min(rule, kept or rule))
        yield (
            f"rule of thumb: 34 bytes per token, layer and channel (arXiv 2205.05198, 16 bits) are"
            f" {rule / unit_bytes:,.2f} {unit} of activations; here {kept / unit_bytes:,.2f}"
        )


def as_json(plan: Plan, length: RunLength, flops: Flops | None) -> dict[str, Any]:
    """Return a plan for `plan.json`: values named as in `summary.json`, and the memory timeline of a step."""
    moments = plan.moments
    stride = max(-(-len(moments) // _POINTS), 1)
    # keep the peak of each interval, so that none is lost
    picked = [max(moments[i : i + stride], key=lambda moment: moment.total) for i in range(0, len(moments), stride)]
    names = sorted({key for moment in picked for key in moment.held}, key=_order)
    values: dict[str, Any] = {
        "steps": length.steps,
        "samples": length.samples,
        "tokens": length.tokens,
        "global_batch_size": plan.accumulation.global_batch_size,
        "peak_memory_gib": round(gib(plan.peak.total), 4),
        "tokens_per_second": length.tokens_per_second,
        "samples_per_second": length.samples_per_second,
        "mfu": length.mfu,
        "step_seconds": length.step_seconds,
        "hours": length.hours,
        "dollars": length.dollars,
        "num_parameters": plan.num_parameters,
        "num_ranks": plan.num_ranks,
        "generation_gib": None if plan.generation is None else round(gib(plan.generation.gathered_bytes), 4),
        "checkpoint_gib": round(gib(plan.checkpoint_bytes), 4),
        "disk_gib": round(gib(plan.disk_bytes), 4),
        "flops_per_sample": None if flops is None else flops.palm,
        "bubble": None if plan.times is None else plan.times.bubble,
    }
    known = {name: value for name, value in values.items() if value is not None}
    return known | {
        "fits": plan.fits,
        "hardware": plan.cluster.device.name,
        "usable_gib": round(gib(plan.limit_bytes), 4),
        "peak_gib": {name: round(gib(size), 4) for name, size in plan.peak.held.items() if size > 0},
        "communication": [
            {
                "dimension": part.dimension,
                "ranks": part.num_ranks,
                "gib": round(gib(part.num_bytes), 4),
                "seconds": part.seconds,
                "exposed_seconds": part.exposed_seconds,
            }
            for part in (() if plan.times is None else plan.times.communication.traffic)
        ],
        "host_gib": {name: round(gib(size), 4) for name, size in plan.host.items()},
        "timeline": {
            "sections": [describe_place(moment) for moment in picked],
            "gib": {name: [round(gib(moment.held.get(name, 0)), 5) for moment in picked] for name in names},
        },
    }


def _order(name: str) -> tuple[int, str]:
    known = ("weights", "master weights", *CATEGORIES[1:])
    return (known.index(name) if name in known else len(known), name)
