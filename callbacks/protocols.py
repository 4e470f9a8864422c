"""What a module or a strategy may provide to these callbacks; each does without what is not provided.

Every name that is looked up on a module begins with `recipes_`, so that no attribute of someone's module is taken for
one of these by chance. Inherit from a protocol, or just define its members.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class FlopFigures(Protocol):
    """FLOPs of a forward and a backward pass, without recomputation."""

    @property
    def palm(self) -> float:
        """Attention counted in full."""

    @property
    def causal(self) -> float:
        """Attention counted at half, for the causal mask."""


@runtime_checkable
class SupportsFlops(Protocol):
    """A module that knows the FLOPs of its batches, for `SpeedMonitor`."""

    def recipes_flops(self, batch: Any) -> FlopFigures | None:
        """Return the FLOPs of a micro-batch on this rank; None: they are to be counted."""


@runtime_checkable
class SupportsMetaForward(Protocol):
    """A module that can run without memory or values, so that `SpeedMonitor` counts its FLOPs there."""

    def recipes_forward_on_meta(self, batch: Any) -> Tensor:
        """Return the outputs of a micro-batch from an unsharded copy of the model on the meta device."""


@runtime_checkable
class SupportsConsumed(Protocol):
    """A module that counts its data, for `SpeedMonitor`."""

    def recipes_consumed(self) -> tuple[int, int]:
        """Return samples and tokens consumed so far over all ranks, up to date when `on_train_batch_end` begins."""


@runtime_checkable
class SupportsText(Protocol):
    """A module that generates text, for `SampleText`."""

    def recipes_generate_text(
        self, prompt: str, num_tokens: int, *, temperature: float, top_k: int | None, top_p: float | None, seed: int
    ) -> str | None:
        """Return the continuation of a prompt, without the prompt; None: it has no text."""


@runtime_checkable
class SupportsAnswers(Protocol):
    """A module that answers questions of its validation data, for `AnswerCheck`."""

    def recipes_answer_questions(
        self,
        num_questions: int,
        *,
        num_tokens: int | None,
        rank: int,
        num_ranks: int,
        all_ended: Callable[[bool], bool],
    ) -> list[tuple[str, str, str]] | None:
        """Return question, expected and given answer of a rank's share; None: the data has no questions.

        `all_ended` is to be called after each token with whether all answers of this rank have ended, by a module whose
        forward pass is a collective, and stops it when it returns True.
        """


@runtime_checkable
class SupportsRow(Protocol):
    """A module that writes the row of a step itself, once: Lightning's `log` costs about 0.2 ms per metric."""

    @property
    def recipes_row(self) -> dict[str, float | Tensor]:
        """Return the metrics of the current step, a new dict for each step; callbacks add theirs to it."""


@runtime_checkable
class SupportsSampleLosses(Protocol):
    """A module that knows the loss of each sample, for the debug dump of a spike."""

    def recipes_sample_losses(self, batch: Any) -> Tensor:
        """Return the losses of a micro-batch, [B]."""


@runtime_checkable
class SupportsSavedWeights(Protocol):
    """A module that writes its weights itself, sharded ones included, for the debug dump of a spike."""

    def recipes_save_weights(self, folder: Path) -> None:
        """Write the weights into a folder; called on every rank."""


@runtime_checkable
class KeepsGradNorm(Protocol):
    """A strategy that keeps the gradient norm it has clipped by, for `GradNormMonitor`.

    Attributes:
        grad_norm: Global L2 norm before clipping of the last optimizer step, 0-dim; None before the first.
        clip_threshold: Norm to which the gradients of that step were limited, 0-dim; inf without a limit.
        clipping: Not None where the threshold changes from step to step.
    """

    grad_norm: Tensor | None
    clip_threshold: Tensor | None
    clipping: Any


@runtime_checkable
class CountsOverflows(Protocol):
    """A strategy that scales the loss itself, for `LossScaleMonitor`.

    Attributes:
        current_loss_scale: What the loss is multiplied by; None: it is not scaled.
        num_overflows: Steps that this process has skipped because a gradient was not finite.
    """

    @property
    def current_loss_scale(self) -> float | None: ...

    @property
    def num_overflows(self) -> int: ...
