"""Next-token prediction: loss per token, and generated text if there is a tokenizer."""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.metrics import ValidationMetrics
from recipes.model import LanguageModel
from recipes.model.generate import generate, generate_batch
from recipes.numerics.collectives import reduce_parts
from recipes.numerics.head_loss import HeadLoss, cast_weight, split
from recipes.numerics.loss import IGNORE_INDEX, token_losses
from recipes.parallel.stages import PipelineRanks
from recipes.parallel.tensor import TensorRanks
from recipes.strategy.pipeline import Pipeline
from recipes.task.base import Batch
from recipes.task.experts import TrainsExperts
from recipes.tokenizer import Tokenizer

_QUESTIONS_AT_A_TIME = 32  # of a rank
_NOT_ENDED = " …"
_MORE_TOKENS = 8  # than the longest expected answer: one that is too long is wrong as soon as it is longer


class LanguageModeling(TrainsExperts):
    """Trains a model of tokens [B, T] -> logits [B, T, V]. Arguments: see `TrainingTask`.

    Attributes:
        tokenizer: For `generate_text`; None if the data is not text.
        source: Of the data, for `answer_questions`; None without a data module.
    """

    input_kind: ClassVar[str] = "tokens"

    tokenizer: Tokenizer | None = None
    source: Any = None

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.trainer.datamodule is None:  # type: ignore[attr-defined]
            return
        self.source = self.trainer.datamodule.source  # type: ignore[attr-defined]
        self.tokenizer = self.source.tokenizer
        if getattr(self.source, "packs", False):
            self._check_positions(self.meta_model())

    def _check_positions(self, model: nn.Module) -> None:
        takes_positions = "positions" in inspect.signature(model.forward).parameters
        if not takes_positions or not getattr(model, "keeps_documents_apart", True):
            title = getattr(model, "title", type(model).__name__)
            why = "was not compared on them" if takes_positions else "takes no positions"
            reason = f"{title} {why}: packed examples would see each other"
            raise ConfigError("data.packing=true", reason, "data.packing=false")

    def _run(self, batch: Batch, **options: Any) -> Any:
        """Return what the model returns of a batch, whose rows may hold several documents."""
        if "positions" in batch:
            options["positions"] = batch["positions"]  # [B, T]
        forward = self.stage_forward or self.model
        return forward(batch["inputs"], **options)

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self._run(batch)  # [B, T, V], compute dtype
        return self.cross_entropy_sum(logits, batch["targets"]), logits

    @functools.cached_property
    def _head_loss(self) -> HeadLoss | None:
        """The loss that needs some of the logits at a time; None: by choice, or for a model without `reduce`."""
        takes_reduce = "reduce" in inspect.signature(self.model.forward).parameters
        if self._loss_chunk_tokens is None or not takes_reduce:
            return None
        if not getattr(self.model, "computes_loss_in_chunks", True):
            return None
        ranks: TensorRanks | None = getattr(getattr(self.model, "head", None), "ranks", None)
        stages: PipelineRanks | None = getattr(self.model, "pipeline", None)
        head_loss = HeadLoss(
            vocab_size=cast(LanguageModel, self.model).vocab_size,
            chunk_tokens=self._loss_chunk_tokens,
            **self._regularizer,
            vocabulary_group=None if ranks is None else ranks.group,
            retains_graph=stages is not None and stages.plan.schedule == "ZBVZeroBubble",
        )
        if self._compile_mode is not None:
            head_loss.compile()
        return head_loss

    @override
    def objective_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        own = self.own_tokens(batch)
        objective, loss = self.own_objective_sum(own)
        return self.add_terms(objective, stage=self.model, targets=own["targets"]), loss

    @override
    def own_objective_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._head_loss is None:
            return super().objective_sum(batch)
        scale = None
        if self.scales_loss and torch.is_grad_enabled():
            unscaled = torch.ones((), device=batch["inputs"].device) * (self._undo_division() / batch["num_targets"])
            scale = self.trainer.strategy.scale_loss(unscaled)  # type: ignore[attr-defined]
        reduce = functools.partial(self._head_loss, targets=batch["targets"], scale=scale)
        objective, loss, by_token = self._run(batch, reduce=reduce)
        if "source" in batch:
            self.add_sources(batch, by_token)
        return objective, loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = self.own_tokens(batch)
        pipeline: Pipeline | None = self.trainer.strategy.pipeline  # type: ignore[attr-defined]
        if pipeline is not None and not pipeline.has_last:
            self._run(batch)  # metrics are those of the ranks that compute the loss
            return
        if self._head_loss is None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            return
        metrics = self._metrics_of(dataloader_idx)
        measure = functools.partial(self._measure, self._head_loss, targets=batch["targets"], metrics=metrics)
        losses = self._run(batch, reduce=measure)
        if "source" in batch and metrics is self.val_metrics:
            metrics.update_sources(losses, batch["targets"], batch["source"])

    def _measure(
        self, head_loss: HeadLoss, hidden: Tensor, weight: Tensor, *, targets: Tensor, metrics: ValidationMetrics
    ) -> Tensor:
        """Add a batch to validation metrics, some tokens at a time, and return the loss of each target, [B, T].

        Args:
            head_loss: Of this task.
            hidden: [B, T, W], input of the head.
            weight: [V, W] of the head, with padding.
            targets: [B, T].
            metrics: Of the validation under way.
        """
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [B T, W], [B T]
        weight = cast_weight(weight)
        losses = []
        for part in split(len(flat), head_loss.chunk_tokens):
            logits = head_loss.logits(flat[part], weight)  # [n, V], compute dtype
            losses.append(token_losses(logits, flat_targets[part]))  # [n]
            metrics.update(loss_sum=losses[-1].sum(), logits=logits, targets=flat_targets[part])
        return torch.cat(losses).view_as(targets)

    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        batch = self.own_tokens(batch)
        if self._head_loss is None:
            losses = token_losses(self._run(batch), batch["targets"])  # [B, T]
        else:
            of_tokens = functools.partial(self._head_loss.token_losses, targets=batch["targets"])
            losses = self._run(batch, reduce=of_tokens)
        num_targets = (batch["targets"] != IGNORE_INDEX).sum(dim=1)  # [B]
        of_samples = torch.stack([losses.sum(dim=1), num_targets.to(losses.dtype)])  # [2, B]
        ranks = getattr(self.model, "context", None)
        loss_sums, counts = of_samples if ranks is None else reduce_parts(of_samples, ranks.group)
        means: Tensor = loss_sums / counts
        return means

    def _tokens_per_sample(self, batch: Batch) -> int:
        return int(batch["inputs"].shape[1])

    def generate_text(
        self,
        prompt: str | list[int],
        num_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int,
        ends: Collection[int] = (),
    ) -> str | None:
        """Return the continuation of a prompt, without the prompt; None without a tokenizer. Call on every rank.

        Args:
            prompt: Text, or tokens; an empty one starts a new document.
            num_tokens: Largest number of tokens to add.
            temperature: 0: always the likeliest token; below 1: sharper; above 1: flatter.
            top_k: Sample among the k likeliest tokens; None: all.
            top_p: Sample among the fewest tokens that have this probability together; None: all.
            seed: Of the sampling.
            ends: Tokens that end it, in addition to end-of-text.
        """
        if self.tokenizer is None:
            return None
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_tokens = tokens or [self.tokenizer.end_of_text]
        with self.trainer.precision_plugin.forward_context():
            tokens = generate(
                cast(LanguageModel, self.model),
                prompt_tokens,
                num_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                ends=[self.tokenizer.end_of_text, *ends],
                agree=self.trainer.strategy.broadcast,
            )
        return self.tokenizer.decode(tokens)

    recipes_generate_text = generate_text  # for the callback that samples

    def answer_questions(
        self,
        num_questions: int,
        *,
        num_tokens: int | None,
        rank: int,
        num_ranks: int,
        all_ended: Callable[[bool], bool],
    ) -> list[tuple[str, str, str]] | None:
        """Return question, expected and given answer of this rank's share of validation questions.

        Call on every rank. The likeliest token is taken each time.

        Args:
            num_questions: Of all ranks.
            num_tokens: Largest number of tokens of an answer; None: somewhat more than the longest expected one.
            rank: Of this process.
            num_ranks: That share the questions.
            all_ended: Returns whether a flag is true on every rank.

        Returns:
            Texts; an answer that did not end ends with an ellipsis. None if the data has no questions.
        """
        if self.tokenizer is None or not hasattr(self.source, "questions"):
            return None
        questions: list[tuple[list[int], list[int]]] = self.source.questions(num_questions)
        found_ends = {self.tokenizer.find_end(answer) for _, answer in questions} - {None}
        ends = cast(set[int], found_ends | {self.tokenizer.end_of_text})
        if num_tokens is None:
            num_tokens = max((len(answer) for _, answer in questions), default=0) + _MORE_TOKENS
        found: list[tuple[str, str, str]] = []
        # the same number of batches on every rank: where weights are sharded, each forward pass is a collective
        for start in range(0, len(questions), num_ranks * _QUESTIONS_AT_A_TIME):
            batch = questions[start : start + num_ranks * _QUESTIONS_AT_A_TIME]
            mine = batch[rank::num_ranks]
            with self.trainer.precision_plugin.forward_context():
                given = generate_batch(
                    cast(LanguageModel, self.model),
                    [prompt for prompt, _ in mine] or [batch[0][0]],
                    num_tokens,
                    temperature=0.0,
                    top_k=None,
                    top_p=None,
                    seeds=range(max(1, len(mine))),
                    ends=ends,
                    all_ended=all_ended,
                )
            for (prompt, expected), answer in zip(mine, given, strict=False):
                until_end = list(itertools.takewhile(lambda token: token not in ends, expected))
                # without a token that ends it, an answer is as long as the expected one
                has_end = len(until_end) < len(expected)
                tokens = answer.tokens if has_end else answer.tokens[: len(expected)]
                texts = [self.tokenizer.decode(part) for part in (prompt, until_end, tokens)]
                if has_end and not answer.has_ended:
                    texts[2] += _NOT_ENDED
                found.append((texts[0], texts[1], texts[2]))
        return found

    recipes_answer_questions = answer_questions  # for the callback that compares answers
