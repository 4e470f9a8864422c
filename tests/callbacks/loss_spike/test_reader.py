"""The scalars of each step arrive once and in order, wherever they were computed."""

import torch

from callbacks.loss_spike.reader import DelayedReadback


class CopiedLater:
    """Stands in for the CUDA event of a copy under way."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_scalars_on_the_host_arrive_at_once() -> None:
    readback = DelayedReadback()
    assert [readback.exchange(step, [torch.tensor(float(step))]) for step in (1, 2)] == [(1, [1.0]), (2, [2.0])]
    assert readback.take() is None


def test_a_step_on_the_host_comes_after_the_step_before_it_that_is_still_being_copied() -> None:
    """As an overflow under DeepSpeed on a GPU, whose norm is no tensor of the device: the order was 1, 3, 2, 4."""
    readback, copied = DelayedReadback(), CopiedLater()
    arrived = [readback.exchange(1, [torch.tensor(1.0)])]
    readback._pending = (2, torch.tensor([2.0]), copied)  # type: ignore[assignment]
    arrived += [readback.exchange(step, [torch.tensor(float(step))]) for step in (3, 4)]
    arrived += [readback.take(), readback.take()]
    assert arrived == [(1, [1.0]), (2, [2.0]), (3, [3.0]), (4, [4.0]), None]
    assert copied.num_waits == 1


def test_a_rollback_forgets_the_step_under_way() -> None:
    readback = DelayedReadback()
    readback._pending = (2, torch.tensor([2.0]), None)
    readback.drop()
    assert readback.take() is None
