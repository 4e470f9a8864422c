"""An operator takes as long as its arithmetic or its traffic; a compiled stretch reads and writes once."""

import pytest
import torch

from recipes.plan.roofline import Rates, time_step
from recipes.plan.trace import Cost, Op

RATES = Rates(
    tflops={"bf16": 100.0, "fp16": 100.0, "fp32": 10.0},
    bandwidth=1e12,
    matmul=0.5,
    attention=(0.4, 0.2),
    attention_keys=(100, 300),
    memory=1.0,
    kernel_seconds=0.0,
    launch_seconds=(0.0, 0.0),
)


def _op(
    kind: str,
    *,
    flops: float = 0.0,
    num_bytes: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "aten::op",
    num_keys: int = 0,
    padded_flops: float = 0.0,
    reread_bytes: float = 0.0,
    reads: dict[int, float] | None = None,
    writes: dict[int, float] | None = None,
    temporary: frozenset[int] = frozenset(),
) -> Op:
    cost = Cost(kind, flops, num_bytes, dtype, 1, num_keys, padded_flops, reread_bytes)  # type: ignore[arg-type]
    return Op(
        name=name,
        section="forward/block 0",
        cost=cost,
        allocated={},
        freed={},
        reads=reads or {},
        writes=writes or {},
        temporary=temporary,
    )


def _seconds(*ops: Op, is_compiled: bool = False) -> float:
    return time_step(ops, RATES, is_compiled=is_compiled).of("forward").total


def test_a_product_takes_its_flops_at_the_rate_of_its_dtype() -> None:
    assert _seconds(_op("matmul", flops=1e12)) == pytest.approx(1e12 / (100e12 * 0.5))
    assert _seconds(_op("matmul", flops=1e12, dtype=torch.float32)) == pytest.approx(1e12 / (10e12 * 0.5))


def test_a_thin_product_takes_as_long_as_reading_its_matrices() -> None:
    assert _seconds(_op("matmul", flops=1e6, num_bytes=1e10)) == pytest.approx(1e-2)


def test_the_backward_pass_of_attention_has_a_rate_of_its_own() -> None:
    num_keys = 1_000_000_000
    forward = _seconds(_op("attention", flops=1e12, name="aten::flash", num_keys=num_keys))
    backward = _seconds(_op("attention", flops=1e12, name="aten::flash_backward", num_keys=num_keys))
    assert forward == pytest.approx(1e12 / (100e12 * 0.4))
    assert backward == pytest.approx(2 * forward)


def test_attention_over_short_sequences_is_slower_most_in_the_backward_pass() -> None:
    long, short = (_seconds(_op("attention", flops=1e12, num_keys=num_keys)) for num_keys in (10**9, 100))
    assert short == pytest.approx(2 * long)
    name = "aten::flash_backward"
    long, short = (_seconds(_op("attention", flops=1e12, name=name, num_keys=n)) for n in (10**9, 100))
    assert short == pytest.approx(4 * long)


def test_a_convolution_takes_its_padded_flops_or_the_float32_units_if_they_are_faster() -> None:
    full = _op("convolution", flops=1e12, padded_flops=2e12)
    assert _seconds(full) == pytest.approx(2e12 / (100e12 * 0.5))
    depthwise = _op("convolution", flops=1e12, padded_flops=512e12)
    assert _seconds(depthwise) == pytest.approx(1e12 / (10e12 * 0.5))
    assert _seconds(_op("convolution", flops=1e6, padded_flops=1e6, num_bytes=1e10)) == pytest.approx(1e-2)


def test_batch_statistics_end_a_compiled_chain_and_are_read_again() -> None:
    gib = 2.0**30
    chain = [
        _op("memory", num_bytes=2 * gib, reads={0: gib}, writes={1: gib}),
        _op("memory", num_bytes=3 * gib, reread_bytes=gib, reads={1: gib}, writes={2: gib}, temporary=frozenset({2})),
        _op("memory", num_bytes=2 * gib, reads={2: gib}, writes={3: gib}),
    ]
    assert _seconds(*chain) == pytest.approx(7 * gib / 1e12)
    assert _seconds(*chain, is_compiled=True) == pytest.approx((2 + 3) * gib / 1e12)


def test_a_compiled_chain_reads_its_input_and_writes_its_result_once() -> None:
    gib = 2.0**30
    chain = [
        _op("memory", num_bytes=2 * gib, reads={0: gib}, writes={1: gib}, temporary=frozenset({1})),
        _op("memory", num_bytes=2 * gib, reads={1: gib}, writes={2: gib}, temporary=frozenset({2})),
        _op("memory", num_bytes=2 * gib, reads={2: gib}, writes={3: gib}),
    ]
    assert _seconds(*chain) == pytest.approx(6 * gib / 1e12)
    assert _seconds(*chain, is_compiled=True) == pytest.approx(2 * gib / 1e12)


def test_a_product_ends_a_compiled_chain() -> None:
    gib = 2.0**30
    chain = [
        _op("memory", num_bytes=2 * gib, reads={0: gib}, writes={1: gib}),
        _op("matmul", num_bytes=gib),
        _op("memory", num_bytes=2 * gib, reads={1: gib}, writes={2: gib}),
    ]
    assert _seconds(*chain, is_compiled=True) == pytest.approx(5 * gib / 1e12)


def test_many_small_kernels_wait_for_the_host() -> None:
    rates = Rates(tflops=RATES.tflops, bandwidth=1e12, matmul=0.5, attention=(0.4, 0.2), launch_seconds=(1e-5, 1e-6))
    step = time_step([_op("memory", num_bytes=8.0)] * 1000, rates, is_compiled=False)
    assert step.of("forward").total == pytest.approx(1000 * 1e-5)
    assert step.of("forward").waiting > 0.5 * step.of("forward").total
