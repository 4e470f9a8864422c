"""The tracer counts bytes as torch's allocator does, and says what they hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.plan.memory import find_peak, timeline
from recipes.plan.trace import ACTIVATIONS, WEIGHTS, Cost, StepTracer

KIB = 2**10


def test_a_tensor_is_live_from_its_operator_until_nothing_refers_to_it() -> None:
    with FakeTensorMode(), StepTracer() as tracer:
        tracer.section = "forward"
        first = torch.zeros(KIB)  # 4 KiB
        second = first + 1  # 8 KiB in all
        del first
        third = second * 2  # 8 KiB: the first is gone
        del second, third
    moments = list(timeline(tracer.ops()))
    assert [moment.total for moment in moments if moment.op != "start"] == [4 * KIB, 8 * KIB, 8 * KIB]


def test_the_operator_that_frees_its_input_holds_both_for_a_moment() -> None:
    with FakeTensorMode(), StepTracer() as tracer:
        tracer.section = "forward"
        value = torch.zeros(KIB)
        for _ in range(3):
            value = value + 1
    assert find_peak(timeline(tracer.ops())).total == 8 * KIB


def test_a_view_holds_nothing_of_its_own() -> None:
    with FakeTensorMode(), StepTracer() as tracer:
        tracer.section = "forward"
        whole = torch.zeros(4, KIB)
        part = whole[1].view(2, -1)
        del whole
        kept = part + 1
        del part, kept
    assert [moment.total for moment in timeline(tracer.ops())][-1] == 16 * KIB + 4 * KIB


def test_a_storage_that_is_resized_counts_with_its_new_size() -> None:
    """As FSDP2 does with gathered weights."""
    with FakeTensorMode(), StepTracer() as tracer:
        tracer.section = "forward"
        gathered = torch.zeros(KIB)
        gathered.untyped_storage().resize_(0)
        other = torch.zeros(KIB)
        gathered.untyped_storage().resize_(8 * KIB)
        after = other + 1
        del after
    totals = [moment.total for moment in timeline(tracer.ops()) if moment.op != "start"]
    assert totals == [4 * KIB, 4 * KIB, 12 * KIB, 16 * KIB]


def test_what_the_forward_pass_leaves_for_the_backward_pass_are_activations() -> None:
    with FakeTensorMode():
        layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False))
        with StepTracer() as tracer:
            for weight in layers.parameters():
                tracer.add(weight, category=WEIGHTS)
            tracer.section = "forward/block 0"
            loss = layers(torch.zeros(16, 64)).sum()
            tracer.end_forward()
            tracer.section = "backward/block 0"
            loss.backward()
    held = max((moment.held.get(ACTIVATIONS, 0) for moment in timeline(tracer.ops())), default=0)
    # the input of each matrix product and that of the GELU, 4 KiB each, and the loss
    assert held == 3 * 4 * KIB + 4


def test_the_tracer_leaves_no_trace_of_itself() -> None:
    before = torch.UntypedStorage.resize_
    with FakeTensorMode(), StepTracer():
        torch.zeros(1)
    assert torch.UntypedStorage.resize_ is before


def test_what_elementwise_operators_of_a_compiled_block_pass_on_takes_no_memory() -> None:
    peaks = {}
    for is_compiled in (False, True):
        with FakeTensorMode(), StepTracer() as tracer:
            tracer.section = "forward/block 0"
            product = torch.zeros(16, 16) @ torch.zeros(16, 16)  # 1 KiB each
            wide = product.to(torch.float64)  # 2 KiB
            shifted = wide.mul(2).view(-1)
            del wide, product
            narrow = shifted.to(torch.float32)
            del shifted
            result = narrow.view(16, 16) @ narrow.view(16, 16)
            del narrow, result
        moments = list(timeline(tracer.ops(is_compiled=is_compiled)))
        (first,) = [index for index, moment in enumerate(moments) if moment.op == "aten::mm"][:1]
        peaks[is_compiled] = max(moment.total for moment in moments[first + 1 :])
        assert sum(moments[-1].held.values()) <= 2 * KIB
    assert peaks == {False: 5 * KIB, True: 2 * KIB}  # compiled, the kernel reads one KiB and writes one


def _trace(module: nn.Module, *shape: int, is_trained: bool = True) -> dict[str, Cost]:
    """Return the cost of each operator, by name, of a forward and backward pass in 16 bits on random inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)  # [B, C, H, W]
        module = module.to(torch.bfloat16).train(is_trained)
        with StepTracer() as tracer:
            tracer.section = "forward"
            module(x).square().sum().backward()
    return {op.name.removeprefix("aten::"): op.cost for op in tracer.ops()}


def test_the_gradients_of_a_convolution_take_twice_its_flops_and_read_that_of_its_results_twice() -> None:
    costs = _trace(nn.Conv2d(64, 128, 3, padding=1, bias=False), 2, 64, 8, 8)
    forward, backward = costs["convolution"], costs["convolution_backward"]
    flops = 2 * 2 * 8 * 8 * 64 * 128 * 9
    assert (forward.flops, forward.padded_flops) == (flops, flops)  # multiples of 8 and 64: nothing is padded
    assert (backward.flops, backward.num_launches) == (2 * flops, 2)
    x, y, weight = (2 * size for size in (2 * 64 * 64, 2 * 128 * 64, 9 * 64 * 128))  # bytes
    assert forward.num_bytes == x + weight + y
    assert backward.num_bytes == 2 * y + (x + weight) + (x + weight)


def test_channels_of_a_convolution_are_padded_to_the_tiles_of_tensor_cores() -> None:
    stem = _trace(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), 2, 3, 32, 32)["convolution"]
    assert stem.padded_flops / stem.flops == pytest.approx(8 / 3)  # channels that are loaded, of a group
    depthwise = _trace(nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), 2, 32, 8, 8)
    assert depthwise["convolution"].flops == 2 * 2 * 8 * 8 * 32 * 9
    assert depthwise["convolution"].padded_flops / depthwise["convolution"].flops == 8 * 64
    # torch's own formula would count each of the 32 channels against all of them
    assert depthwise["convolution_backward"].flops == 2 * depthwise["convolution"].flops


def test_batch_statistics_take_a_pass_of_their_own_and_running_ones_none() -> None:
    costs = _trace(nn.BatchNorm2d(64), 4, 64, 32, 32)
    x = 2.0 * 4 * 64 * 32 * 32  # bytes
    assert costs["native_batch_norm"].num_bytes == pytest.approx(3 * x, rel=0.01)
    assert costs["native_batch_norm_backward"].num_bytes == pytest.approx(5 * x, rel=0.01)
    assert costs["native_batch_norm_backward"].reread_bytes == 2 * x
    frozen = _trace(nn.BatchNorm2d(64), 4, 64, 32, 32, is_trained=False)
    assert frozen["native_batch_norm"].num_bytes == pytest.approx(2 * x, rel=0.01)


class _Attends(nn.Module):
    def __init__(self, *, is_causal: bool, mask: Tensor | None = None) -> None:
        super().__init__()
        self.is_causal, self.mask = is_causal, mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask, is_causal=self.is_causal)


def test_attention_without_a_mask_computes_all_scores_and_under_a_causal_one_half() -> None:
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    whole, half = (_trace(_Attends(is_causal=causal), 2, 4, 64, 32)[flash] for causal in (False, True))
    assert whole.flops == 2 * half.flops == 2 * 2 * 2 * 4 * 64 * 64 * 32
    assert (whole.num_keys, half.num_keys) == (128, 64)
    added = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)
    documents = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    assert _trace(_Attends(is_causal=False, mask=added), 2, 4, 64, 32)[flash].flops == whole.flops
    assert _trace(_Attends(is_causal=False, mask=documents), 2, 4, 64, 32)[flash].flops == half.flops
