"""Preference tuning: the better of two answers becomes more probable, or good answers do and bad ones do not.

Shapes: B samples, K answers of a sample, R = B K rows of T tokens.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from recipes.adapter import switched_off
from recipes.errors import ConfigError
from recipes.lightning_internals import get_data
from recipes.loss.preference import AnswerLoss, Likelihoods, count_tokens
from recipes.model.weights.adapter import has_adapter
from recipes.numerics.head_loss import split
from recipes.numerics.linear import get_product_dtype
from recipes.numerics.loss import IGNORE_INDEX, token_losses
from recipes.task.base import Batch
from recipes.task.language_modeling import LanguageModeling
from recipes.task.reference import ReferenceTable

LOGGER = logging.getLogger("lightning_recipes")
# of the log-probability of an answer, relative: a batch with other rows is computed in another order
_LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.float64: 1e-12}
_LARGEST_OF_HALF = 2e-2


class PreferenceTuning(LanguageModeling):
    """Trains a language model on preferences; the loss reads the log-probabilities of answers.

    Args:
        reference: What answers are measured against: the model without its adapter, or the log-probabilities under the
            first weights, computed once before the first step.
        cache_dir: Folder of cached log-probabilities.
        **settings: Arguments of `TrainingTask`.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "evaluate_tasks"})
    loss: AnswerLoss

    def __init__(
        self, *, reference: Literal["auto", "adapter_off", "precomputed"], cache_dir: str, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._reference = reference
        self._cache_dir = cache_dir
        self._table: ReferenceTable | None = None
        self._compares_first_step = False
        self._kl: Tensor | None = None  # [], of the validation that runs

    # What the loss reads.

    @override
    def outputs(self, batch: Batch) -> Likelihoods:
        loss, num_answers = self.loss, self.loss.num_answers
        log_probs, of_prompts = self._log_probs(batch, with_prompts=loss.reads_prompts)  # [R] each
        kl = self._find_kl(batch) if loss.reads_kl else None
        found = Likelihoods(
            log_probs.unflatten(0, (-1, num_answers)),
            reference=self._look_up(batch)[:, :num_answers] if loss.needs_reference else None,
            of_prompts=of_prompts[0::num_answers] if loss.reads_prompts else None,
            kl=kl,
        )
        if self._compares_first_step and torch.is_grad_enabled():
            self._check_first_step(found, count_tokens(batch, num_answers=num_answers))
        return found

    @override
    def _without_padding(self, outputs: Any) -> Any:
        return outputs

    @override
    def own_terms(self, batch: Batch) -> Any:
        return self.loss(self.outputs(batch), batch)

    @override
    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        return self.loss.per_sample(self.outputs(batch), batch)

    def _log_probs(
        self, batch: Batch, *, with_prompts: bool = False, inputs: str = "inputs", targets: str = "targets"
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the answers and, if asked, of the prompts before them, [R] float32 each.

        Args:
            batch: The batch.
            with_prompts: Whether to compute those of the prompts; if not, they are 0.
            inputs: Name of the rows.
            targets: Name of their targets.
        """
        tokens, wanted = batch[inputs], batch[targets]  # [R, T]
        if with_prompts:
            followers = _name_followers(tokens, wanted, batch["num_inputs"])  # [R, T]
            losses = self._token_losses(tokens, followers)
            is_answer = wanted != IGNORE_INDEX
            return -(losses * is_answer).sum(dim=1), -(losses * ~is_answer).sum(dim=1)
        log_probs = -self._token_losses(tokens, wanted).sum(dim=1)
        return log_probs, torch.zeros_like(log_probs)

    def _token_losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each target, [R, T] float32, 0 if ignored; differentiable."""
        if not self._computes_in_chunks:
            return token_losses(self.model(inputs), targets)
        losses: Tensor = self.model(inputs, reduce=functools.partial(self._in_chunks, targets=targets))
        return losses

    @functools.cached_property
    def _computes_in_chunks(self) -> bool:
        # a sharded vocabulary has the loss of its own columns only, and joins the logits in the head
        is_sharded = getattr(getattr(self.model, "head", None), "ranks", None) is not None
        return self.loss.chunk_tokens is not None and self.takes_reduce and not is_sharded

    def _in_chunks(self, hidden: Tensor, weight: Tensor, *, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each target [R, T] from hidden states [R, T, W], a chunk of logits at a time.

        The logits of a chunk are computed again in the backward pass, which costs a third of the head's products and
        holds none of them in between.
        """
        assert self.loss.chunk_tokens is not None
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [R T, W], [R T]
        run: Callable[..., Tensor] = functools.partial(_losses_of_chunk, vocab_size=self.loss.num_outputs)
        parts = [
            checkpoint(run, flat[part], weight, flat_targets[part], use_reentrant=False, preserve_rng_state=False)
            for part in split(len(flat), self.loss.chunk_tokens)
        ]
        return torch.cat(parts).view_as(targets)

    # The reference.

    def _look_up(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of answers under the reference, [B, K'], with those to other prompts last."""
        if self._table is not None:
            found = self._table.look_up(batch["id"])
            if not self.training and found.isnan().any():  # a read of the device, in no training step
                reason = "the reference was computed for the samples of the run, and these are others"
                fix = "the data of the run, or a run with adapter=lora, whose reference is the model without it"
                raise ConfigError("data.… of another run than resume=…", reason, fix)
            return found
        with torch.no_grad(), _evaluating(self.model), switched_off(self.model):
            return self._measure_answers(batch)

    def _measure_answers(self, batch: Batch, *, only_other: bool = False) -> Tensor:
        """Return the log-probabilities of all answers of a batch, [B, K'], without gradients."""
        columns = []
        if not only_other:
            log_probs, _ = self._log_probs(batch)
            columns.append(log_probs.unflatten(0, (-1, self.loss.num_answers)))  # [B, K]
        if self.loss.reads_kl and "other_inputs" in batch:
            log_probs, _ = self._log_probs(batch, inputs="other_inputs", targets="other_targets")
            columns.append(log_probs[:, None])  # [B, 1]
        return torch.cat(columns, dim=1)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.loss.needs_reference:
            self._prepare_reference()
            self._compares_first_step = self.trainer.global_step == 0

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self.loss.needs_reference and self._table is None and not self._uses_adapter:
            self._table = self._open_table()
        if self.loss.reads_kl:
            self._kl = self._measure_kl(self._validation_batches())

    @override
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._kl = None

    @property
    def _uses_adapter(self) -> bool:
        """Whether the reference is the model without its adapter.

        Raises:
            ConfigError: It has none.
        """
        if self._reference == "adapter_off" and not has_adapter(self.model):
            reason = "the model has no adapter to switch off"
            raise ConfigError("task.reference=adapter_off", reason, "adapter=lora, or task.reference=precomputed")
        return self._reference != "precomputed" and has_adapter(self.model)

    def _open_table(self) -> ReferenceTable:
        """Return the table of this run's folder.

        Raises:
            ConfigError: It is not there.
        """
        folder = Path(self.trainer.default_root_dir)
        return ReferenceTable.of_run(folder, engine=self.engine, is_first=self.trainer.is_global_zero)

    def _prepare_reference(self) -> None:
        """Find the log-probabilities under the first weights, or compute them. Collective."""
        if self._uses_adapter or self._table is not None:
            return
        if self.trainer.global_step > 0:
            self._table = self._open_table()
            return
        data: Any = get_data(self.trainer)
        began = time.monotonic()
        sets = data.list_datasets()
        num_samples = sum(len(dataset) for dataset, _ in sets)
        if self.trainer.is_global_zero:
            LOGGER.info("Reference: log-probabilities of %s samples under the first weights", f"{num_samples:,}")
        with torch.no_grad(), _evaluating(self.model):
            table = ReferenceTable.build(
                sets,
                key=self._describe_weights(),
                cache_dir=self._cache_dir,
                run_folder=Path(self.trainer.default_root_dir),
                engine=self.engine,
                is_first=self.trainer.is_global_zero,
                make_loader=data.load_samples,
                measure=self._measure_samples,
                tolerance=self._tolerance,
            )
        self._table = table
        if self.trainer.is_global_zero:
            seconds = time.monotonic() - began
            LOGGER.info("Reference: ready in %.1f s", seconds)

    def _measure_samples(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the ids [B] and log-probabilities [B, K'] of a batch as it comes from a loader."""
        plugin = self.trainer.precision_plugin
        moved = self.engine.batch_to_device(plugin.convert_input(batch))
        with plugin.val_step_context():
            return moved["id"], self._measure_answers(moved)

    def _describe_weights(self) -> str:
        """Return what is equal for equal log-probabilities of equal tokens: weights, settings and dtypes."""
        base = self._identify(self.model, {**self.model_settings, **self._published_config})
        source = getattr(self.first_weights, "hash", None)
        with self.trainer.precision_plugin.val_step_context():
            dtype = get_product_dtype(next(self.model.parameters()))
        products = torch.backends.cuda.matmul.fp32_precision
        name = f"{source or base.hash or base.name} seed {self.seed}{' in NF4' if base.in_nf4 else ''}"
        return f"{name} {sorted(base.settings.items(), key=str)} {dtype} {products}"

    @property
    def _tolerance(self) -> float:
        """Relative difference of equal log-probabilities, computed in other batches."""
        with self.trainer.precision_plugin.val_step_context():
            dtype = get_product_dtype(next(self.model.parameters()))
        return _LARGEST_DIFFERENCE.get(dtype, _LARGEST_OF_HALF)

    def _check_first_step(self, found: Likelihoods, lengths: Tensor) -> None:
        """Report, once, if the first step does not begin at the reference: then rewards are not 0."""
        self._compares_first_step = False
        assert found.reference is not None
        own, reference = found.log_probs.detach(), found.reference
        differs = ((own - reference).abs() / reference.abs().clamp(min=1) * (lengths > 0)).max().item()
        if differs > self._tolerance:
            LOGGER.warning(
                "Before the first step log-probabilities differ from those of the reference by up to %.1e of"
                " themselves: rewards do not begin at 0. Dropout does that (model.dropout=0, adapter.lora_dropout=0)",
                differs,
            )

    # The divergence of KTO.

    @property
    @override
    def looks_ahead(self) -> bool:
        # whoever loads weights alone gives the task another loss
        return isinstance(self.loss, AnswerLoss) and self.loss.reads_kl

    @override
    def before_window(self, micro_batches: list[Batch]) -> list[Batch]:
        """Add the divergence from the reference, over the global batch, to each micro-batch."""
        kl = self._measure_kl(iter(micro_batches))
        return [{**batch, "kl": kl} for batch in micro_batches]

    def _find_kl(self, batch: Batch) -> Tensor:
        """Return the divergence over the global batch, or the validation, of a batch; else over the batch itself."""
        if "kl" in batch:
            kl: Tensor = batch["kl"]
            return kl
        return self._measure_kl(iter([batch])) if self._kl is None else self._kl

    def _measure_kl(self, batches: Iterator[Batch]) -> Tensor:
        """Return the mean log-ratio of answers to other prompts over all batches of all ranks, at least 0; []."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad(), _evaluating(self.model):
            for batch in batches:
                carries = count_tokens(batch, num_answers=1)[:, 0] > 0  # [B]
                own = self._measure_answers(batch, only_other=True)[:, 0]
                ratios = own - self._look_up(batch)[:, 1]  # [B]
                sums += torch.stack([torch.where(carries, ratios, 0.0).double().sum(), carries.double().sum()])
        total, number = self.engine.sum_over_data_ranks(sums).unbind()
        return (total / number.clamp(min=1)).clamp(min=0).float()

    def _validation_batches(self) -> Iterator[Batch]:
        """Yield the batches of the first validation set, on the device."""
        loaders: Any = self.trainer.val_dataloaders
        plugin = self.trainer.precision_plugin
        for batch in loaders[0] if isinstance(loaders, list) else loaders:
            yield self.engine.batch_to_device(plugin.convert_input(batch))


def _name_followers(inputs: Tensor, targets: Tensor, num_inputs: Tensor) -> Tensor:
    """Return the token after each input, [R, T], `IGNORE_INDEX` after the last one unless it is a target."""
    after = torch.cat([inputs[:, 1:], torch.zeros_like(inputs[:, :1])], dim=1)  # [R, T]
    places = torch.arange(inputs.shape[1], device=inputs.device)  # [T]
    after = torch.where(places < num_inputs[:, None] - 1, after, IGNORE_INDEX)
    return torch.where(targets == IGNORE_INDEX, after, targets)


def _losses_of_chunk(hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int | None) -> Tensor:
    """Return the cross-entropy of n targets from hidden states [n, W] and the weight of the head [V', W]."""
    logits = nn.functional.linear(hidden.to(weight.dtype), weight)  # [n, V']
    return token_losses(logits[:, :vocab_size], targets)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while."""
    in_training = [module for module in model.modules() if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
