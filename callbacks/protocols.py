"""Optional protocols through which modules and strategies provide data to the callbacks.

Every name looked up on a module begins with `recipes_`, so that it cannot clash with an unrelated attribute. Inherit
from a protocol, or just define its members.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class FlopFigures(Protocol):
    """FLOPs of one forward and backward pass, excluding recomputation."""

    @property
    def palm(self) -> float:
        """FLOPs with attention counted in full."""

    @property
    def causal(self) -> float:
        """FLOPs with attention counted at half, for the causal mask."""


@runtime_checkable
class SupportsFlops(Protocol):
    """A module that computes the FLOPs of its batches, for `SpeedMonitor`."""

    def recipes_flops(self, batch: Any) -> FlopFigures | None:
        """Return the FLOPs of a micro-batch on this rank; None to have them counted by `SpeedMonitor`.

        Asked once for each set of shapes in the batch, or for each value of `recipes_flops_key(batch)` if the module
        has such a method: that of a module whose FLOPs depend on more, such as on the lengths of padded rows.
        """


@runtime_checkable
class SupportsMetaForward(Protocol):
    """A module that can run on the meta device, where `SpeedMonitor` counts its FLOPs."""

    def recipes_forward_on_meta(self, batch: Any) -> Tensor:
        """Return the outputs of a micro-batch from an unsharded copy of the model on the meta device."""


@runtime_checkable
class SupportsConsumed(Protocol):
    """A module that counts the samples and tokens it consumes, for `SpeedMonitor`."""

    def recipes_consumed(self) -> tuple[int, int]:
        """Return samples and tokens consumed so far on all ranks; up to date when `on_train_batch_end` is called."""


@runtime_checkable
class SupportsText(Protocol):
    """A module that generates text, for `SampleText`."""

    def recipes_generate_text(
        self, prompt: str, num_tokens: int, *, temperature: float, top_k: int | None, top_p: float | None, seed: int
    ) -> str | None:
        """Return the continuation of a prompt, without the prompt; None if the module cannot generate text."""


@runtime_checkable
class SupportsAnswers(Protocol):
    """A module that answers questions from its validation data, for `GenerationEval`."""

    def recipes_answer_questions(
        self,
        num_samples: int,
        *,
        max_new_tokens: int | None,
        rank: int,
        num_ranks: int,
        all_ended: Callable[[bool], bool],
    ) -> list[tuple[str, str, str]] | None:
        """Return (question, expected answer, given answer) of this rank's questions; None if the data has none.

        If the module's forward pass is a collective, call `all_ended` after each token with whether all answers of
        this rank have ended, and stop generating once it returns True.
        """


@runtime_checkable
class SupportsAnswerTokens(Protocol):
    """A module that knows the tokens of its answers, for rewards of `GenerationEval` that read them."""

    def recipes_answer_tokens(self) -> Sequence[list[int]]:
        """Return the tokens of each question with its answer, as `recipes_answer_questions` gave them last."""


@runtime_checkable
class SupportsQuestionRows(Protocol):
    """A module that knows the rows of data that its questions come from, for the rewards of `GenerationEval`."""

    def recipes_question_rows(self, num_samples: int) -> Sequence[Mapping[str, Any]]:
        """Return the fields of the row of each question; called on rank 0 alone."""

    def recipes_answered(self) -> Sequence[int]:
        """Return which of the questions this rank has answered last, in the order of its answers.

        By number, as questions about different images have the same text.
        """


@runtime_checkable
class SupportsRejectedAnswers(Protocol):
    """A module whose data has worse answers to its questions, which `GenerationEval` writes beside the others."""

    def recipes_rejected_answers(self, num_samples: int) -> Mapping[str, str]:
        """Return the worse answer by the question; called on rank 0 alone."""


@runtime_checkable
class SupportsCompletions(Protocol):
    """A module that learns from completions that it samples itself, for `Completions`."""

    def recipes_completions(self, num_completions: int) -> list[dict[str, Any]]:
        """Return some of the newest completions with their rewards; called on rank 0 alone."""


@runtime_checkable
class SupportsZeroShot(Protocol):
    """A module that compares images with captions, for `ZeroShot`. Both methods are called on every rank."""

    def recipes_encode_captions(self, captions: Sequence[str]) -> Tensor:
        """Return the features of captions, [n, F] of any length; called with as many on every rank."""

    def recipes_encode_images(self, paths: Sequence[Path], classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the features of this rank's share of the images in files, [n, F], and the class of each, [n] int64.

        The class is -100 of what only fills up a batch. The shares of all ranks with different samples are all images.
        """


@runtime_checkable
class SupportsRetrieval(Protocol):
    """A module whose validation compares all images with all captions, for `RetrievalReport`."""

    def recipes_retrieved(self) -> dict[str, Any] | None:
        """Return what the newest validation found for some images and captions; called on rank 0 alone.

        Returns:
            `num_images` and `num_captions` that were compared; `captions`, each with its `text`, the `rank` of the
            nearest image of its own, from 1, and its nearest `images`, with their `cosine`, whether it `is_own`, and
            their `pixels`, [C, H, W] uint8; and `images`, each with its `pixels`, `rank` and nearest `captions`, which
            have a `text` instead. None: nothing is known.
        """


@runtime_checkable
class SupportsRow(Protocol):
    """A module that logs each step's metrics in one call itself: Lightning's `log` costs about 0.2 ms per metric."""

    @property
    def recipes_row(self) -> dict[str, float | Tensor]:
        """Return the metrics of the current step, a new dict each step, to which callbacks add their own."""


@runtime_checkable
class SupportsSampleLosses(Protocol):
    """A module that computes per-sample losses, for the debug dump of a spike."""

    def recipes_sample_losses(self, batch: Any) -> Tensor:
        """Return the per-sample losses of a micro-batch, [B]."""


@runtime_checkable
class SupportsSavedWeights(Protocol):
    """A module that saves its own weights, sharded or not, for the debug dump of a spike."""

    def recipes_save_weights(self, folder: Path) -> None:
        """Write the weights into a folder; called on every rank."""


@runtime_checkable
class KeepsGradNorm(Protocol):
    """A strategy that exposes the gradient norm it computes for clipping, for `GradNormMonitor`.

    Attributes:
        grad_norm: Global L2 norm before clipping at the last optimizer step, 0-dim; None before the first.
        clip_threshold: Maximum norm that the gradients were clipped to at that step, 0-dim; inf without clipping.
        clipping: Not None if the threshold changes from step to step.
    """

    grad_norm: Tensor | None
    clip_threshold: Tensor | None
    clipping: Any


@runtime_checkable
class CountsOverflows(Protocol):
    """A strategy that scales the loss itself, for `LossScaleMonitor`.

    Attributes:
        current_loss_scale: Current loss scale; None if the loss is not scaled.
        num_overflows: Steps skipped in this process because a gradient was not finite.
    """

    @property
    def current_loss_scale(self) -> float | None: ...

    @property
    def num_overflows(self) -> int: ...
