"""What tasks share whose loss compares every sample with the whole global batch: two passes in each step."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.task.base import Batch, TrainingTask

_RANDOM, _RANDOM_OF_DEVICE = "random_state", "random_state_of_device"  # keys of a compared batch


class TwoPasses(TrainingTask):
    """Computes the features of the global batch, compares them, and then trains micro-batch by micro-batch.

    The loss of a sample depends on all others of the global batch. So each step has two passes: one without gradients
    over all micro-batches, which finds the features of all ranks, the loss and its gradient with respect to each
    feature; and the usual one, whose micro-batches are trained on the sum of features times these gradients. That is
    the gradient of the whole batch, for every split and engine, for a third more time. Both passes draw the same
    dropout masks; statistics of batch norm are those of a micro-batch in both, and the first leaves none behind.

    A subclass computes `outputs` in a context of `drawing_again(batch)`.
    """

    num_forward_passes: ClassVar[int] = 2

    @abstractmethod
    def compare_window(self, micro_batches: Sequence[Batch], features: Sequence[Any]) -> Sequence[dict[str, Any]]:
        """Compare the features of all ranks, and return what is added to each micro-batch. Collective.

        Args:
            micro_batches: Of this rank.
            features: What `outputs` returned for each, without gradients.
        """

    @override
    def before_window(self, micro_batches: list[Batch]) -> list[Batch]:
        """Add the gradient of the global batch's loss to each micro-batch, and what it is to be drawn with."""
        states: list[dict[str, Tensor]] = []
        features: list[Any] = []
        with torch.no_grad(), _keeping_buffers(self.model):
            for batch in micro_batches:
                states.append(_get_random_states(self.device))
                features.append(self.outputs(batch))
        found = self.compare_window(micro_batches, features)
        return [
            {**batch, **of_batch, **state} for batch, of_batch, state in zip(micro_batches, found, states, strict=True)
        ]


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards, such as running statistics, which a training step is to update once."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, values in before:
        buffer.copy_(values)


def _get_random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators from which a forward pass draws."""
    states = {_RANDOM: torch.get_rng_state()}
    return states | ({_RANDOM_OF_DEVICE: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


@contextmanager
def drawing_again(batch: Batch) -> Iterator[None]:
    """Draw what the first pass drew for this micro-batch; nothing of others."""
    if _RANDOM not in batch:
        yield
        return
    device = batch["inputs"].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(batch[_RANDOM].cpu())  # a dump of the step has been on the device
        if _RANDOM_OF_DEVICE in batch:
            torch.cuda.set_rng_state(batch[_RANDOM_OF_DEVICE].cpu(), device)
        yield
