"""The tracer counts bytes as torch's allocator does, and says what they hold."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.plan.memory import find_peak, timeline
from recipes.plan.trace import ACTIVATIONS, WEIGHTS, StepTracer

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
