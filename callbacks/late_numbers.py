"""Numbers from a GPU one step late, so that nobody waits for it; from a CPU at once. One small copy a step."""

import torch
from torch import Tensor


class LateNumbers:
    """A queue of one. Every rank runs on the same kind of device, so all are as late."""

    def __init__(self) -> None:
        self._under_way: tuple[int, Tensor, torch.cuda.Event] | None = None

    def exchange(self, step: int, values: list[Tensor]) -> tuple[int, list[float]] | None:
        """Hand in the numbers of a step; those that are ready, with their step; None: none are.

        Args:
            step: Whose numbers they are.
            values: 0-dim tensors.
        """
        packed = torch.stack([value.detach().double() for value in values])  # [number of values]
        if not packed.is_cuda:
            return step, packed.tolist()
        ready = self.take()
        self._under_way = self._send(step, packed)
        return ready

    def take(self) -> tuple[int, list[float]] | None:
        """What is under way, waited for."""
        if self._under_way is None:
            return None
        (step, numbers, copied), self._under_way = self._under_way, None
        copied.synchronize()
        return step, numbers.tolist()

    def forget(self) -> None:
        """After a rollback: what is under way belongs to a past that is undone."""
        self._under_way = None

    @staticmethod
    def _send(step: int, packed: Tensor) -> tuple[int, Tensor, torch.cuda.Event]:
        numbers = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        numbers.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return step, numbers, copied
