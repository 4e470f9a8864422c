"""Preference tuning: the better of two answers becomes more probable, or good answers do and bad ones do not.

Shapes: B samples, K answers of a sample, R = B K rows of T tokens.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.data.draws import has_draws
from recipes.errors import ConfigError
from recipes.lightning_internals import get_data
from recipes.loss.preference import AnswerLoss, Likelihoods, count_tokens
from recipes.numerics.linear import get_product_dtype
from recipes.numerics.loss import IGNORE_INDEX
from recipes.run_folder import find_run_folder
from recipes.task.answers import AnswerTask, evaluating
from recipes.task.base import Batch
from recipes.task.reference import ReferenceTable

LOGGER = logging.getLogger("lightning_recipes")
_LOOKED_UP = "looked_up"  # key of a batch, whose reference was measured before the window
# of the log-probability of an answer, relative: a batch with other rows is computed in another order
_LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.float64: 1e-12}
_LARGEST_OF_HALF = 2e-2


class PreferenceTuning(AnswerTask):
    """Trains a language model on preferences; the loss reads the log-probabilities of answers.

    Args:
        reference: What answers are measured against: the model without its adapter; the log-probabilities under the
            first weights, computed once before the first step; or a frozen copy of the model with these weights.
        cache_dir: Folder of cached log-probabilities.
        **settings: Arguments of `TrainingTask`.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "evaluate_tasks"})
    loss: AnswerLoss

    def __init__(
        self,
        *,
        reference: Literal["auto", "adapter_off", "precomputed", "frozen_copy"],
        cache_dir: str,
        **settings: Any,
    ) -> None:
        super().__init__(reference=reference, **settings)
        self._cache_dir = cache_dir
        self._table: ReferenceTable | None = None
        self._compares_first_step = False
        self._kl: Tensor | None = None  # [], of the split that is read
        self._kl_of_sets: list[Tensor] = []  # [] each, of the validation that runs

    @property
    @override
    def _compares(self) -> bool:
        return isinstance(self.loss, AnswerLoss) and self.loss.needs_reference

    @property
    @override
    def _instead_of_adapter(self) -> str:
        return "precomputed"

    # What the loss reads.

    @override
    def outputs(self, batch: Batch) -> Likelihoods:
        loss, num_answers = self.loss, self.loss.num_answers
        # first: what its forward pass keeps is freed before that of the trained model keeps its own
        reference = self._look_up(batch)[:, :num_answers] if loss.needs_reference else None
        log_probs, of_prompts = self._log_probs(self.model, batch, with_prompts=loss.reads_prompts)  # [R] each
        kl = self._find_kl(batch) if loss.reads_kl else None
        found = Likelihoods(
            log_probs.unflatten(0, (-1, num_answers)),
            reference=reference,
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
        self,
        model: nn.Module,
        batch: Batch,
        *,
        with_prompts: bool = False,
        inputs: str = "inputs",
        targets: str = "targets",
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the answers and, if asked, of the prompts before them, [R] float32 each.

        Args:
            model: The trained model, or its frozen copy.
            batch: The batch.
            with_prompts: Whether to compute those of the prompts; if not, they are 0.
            inputs: Name of the rows.
            targets: Name of their targets.
        """
        tokens, wanted = batch[inputs], batch[targets]  # [R, T]
        packing = batch.get("packing", {}).get(inputs)
        if with_prompts:
            followers = _name_followers(tokens, wanted, batch["num_inputs"])  # [R, T]
            losses = self.of_tokens(model, tokens, followers, packing)
            is_answer = wanted != IGNORE_INDEX
            return -(losses * is_answer).sum(dim=1), -(losses * ~is_answer).sum(dim=1)
        log_probs = -self.of_tokens(model, tokens, wanted, packing).sum(dim=1)
        return log_probs, torch.zeros_like(log_probs)

    # The reference.

    def _look_up(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of answers under the reference, [B, K'], with those to other prompts last.

        Raises:
            ConfigError: They are not in the table of the run, or it has none.
        """
        if _LOOKED_UP in batch:
            found: Tensor = batch[_LOOKED_UP]
            return found
        if self.reference_kind == "precomputed":
            return self._look_up_in_table(batch)
        with self.as_reference() as model:
            return self._measure_answers(model, batch)

    def _look_up_in_table(self, batch: Batch) -> Tensor:
        if self._table is None and "reference" in batch:
            values: Tensor = batch["reference"]  # of a plan, which computes nothing in advance
            return values
        table = self._open_table()
        found = table.look_up(batch["id"])
        if not self.training and found.isnan().any():  # a read of the device, in no training step
            reason = "the reference was computed for the samples of the run, and these are others"
            fix = "the data of the run, or a run with task.reference=frozen_copy or adapter=lora"
            raise ConfigError("data.… of another run than resume=…", reason, fix)
        return found

    def _measure_answers(self, model: nn.Module, batch: Batch, *, only_other: bool = False) -> Tensor:
        """Return the log-probabilities of all answers of a batch under a model, [B, K'], without gradients."""
        columns = []
        if not only_other:
            log_probs, _ = self._log_probs(model, batch)
            columns.append(log_probs.unflatten(0, (-1, self.loss.num_answers)))  # [B, K]
        if self.loss.reads_kl and "other_inputs" in batch:
            log_probs, _ = self._log_probs(model, batch, inputs="other_inputs", targets="other_targets")
            columns.append(log_probs[:, None])  # [B, 1]
        return torch.cat(columns, dim=1)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.loss.needs_reference:
            if self.reference_kind == "precomputed":
                self._prepare_table()
            self._compares_first_step = self.trainer.global_step == 0

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self.loss.reads_kl:
            loaders: Any = self.trainer.val_dataloaders
            sets = loaders if isinstance(loaders, list) else [loaders]
            with self.trainer.precision_plugin.val_step_context():  # a hook is outside of autocast, and a step within
                self._kl_of_sets = [self._measure_kl_of(self._on_device(loader)) for loader in sets]

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._kl = self._kl_of_sets[dataloader_idx] if self.loss.reads_kl else None
        super().validation_step(batch, batch_idx, dataloader_idx)

    @override
    def before_split(self, batches: Iterator[Batch]) -> None:
        """Measure the divergence of KTO over the split."""
        if self.loss.reads_kl:
            self._kl = self._measure_kl_of(batches)

    @override
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._kl, self._kl_of_sets = None, []

    def _open_table(self) -> ReferenceTable:
        """Return the table of this run, at first from its folder or that of its checkpoint. Collective, the first time.

        Raises:
            ConfigError: It is not there.
        """
        if self._table is None:
            io = self.engine.checkpoint_io
            loaded = io.loaded if isinstance(io, FolderCheckpointIO) else None
            self._table = ReferenceTable.of_run(
                Path(self.trainer.default_root_dir),
                resumed=None if loaded is None else find_run_folder(loaded),
                keeps=self.trainer.training,
                engine=self.engine,
                is_first=self.trainer.is_global_zero,
            )
        return self._table

    def _prepare_table(self) -> None:
        """Find the log-probabilities under the first weights, or compute them. Collective.

        Raises:
            ConfigError: Samples are drawn while the run goes.
        """
        if self._table is not None:
            return
        if self.trainer.global_step > 0:
            self._open_table()
            return
        data: Any = get_data(self.trainer)
        began = time.monotonic()
        sets = data.list_datasets()
        if any(has_draws(dataset) for dataset, _ in sets):
            reason = "the data draws its samples while the run goes, and no log-probabilities can be computed before"
            raise ConfigError("task.reference=precomputed", reason, "task.reference=frozen_copy, or adapter=lora")
        num_samples = sum(len(dataset) for dataset, _ in sets)
        if self.trainer.is_global_zero:
            LOGGER.info("Reference: log-probabilities of %s samples under the first weights", f"{num_samples:,}")
        with torch.no_grad(), evaluating(self.model):
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
            return moved["id"], self._measure_answers(self.model, moved)

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
        return self._compares and self.loss.reads_kl

    @override
    def before_window(self, micro_batches: list[Batch]) -> list[Batch]:
        """Add the divergence from the reference, over the global batch, to each micro-batch, and what was looked up."""
        looked_up = [self._look_up(batch) for batch in micro_batches]  # [B, K'] each
        kl = self._measure_kl(zip(micro_batches, looked_up, strict=True))
        return [{**batch, "kl": kl, _LOOKED_UP: each} for batch, each in zip(micro_batches, looked_up, strict=True)]

    def _find_kl(self, batch: Batch) -> Tensor:
        """Return the divergence over the global batch, or the validation, of a batch; else over the batch itself."""
        if "kl" in batch:
            kl: Tensor = batch["kl"]
            return kl
        return self._measure_kl([(batch, self._look_up(batch))]) if self._kl is None else self._kl

    def _measure_kl_of(self, batches: Iterable[Batch]) -> Tensor:
        return self._measure_kl((batch, self._look_up(batch)) for batch in batches)

    def _measure_kl(self, batches: Iterable[tuple[Batch, Tensor]]) -> Tensor:
        """Return the mean log-ratio of answers to other prompts over all batches of all ranks, at least 0; [].

        Args:
            batches: Batches, each with its log-probabilities under the reference, [B, K'].
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad(), evaluating(self.model):
            for batch, reference in batches:
                carries = count_tokens(batch, num_answers=1)[:, 0] > 0  # [B]
                own = self._measure_answers(self.model, batch, only_other=True)[:, 0]
                ratios = own - reference[:, 1]  # [B]
                sums += torch.stack([torch.where(carries, ratios, 0.0).double().sum(), carries.double().sum()])
        total, number = self.engine.sum_over_data_ranks(sums).unbind()
        return (total / number.clamp(min=1)).clamp(min=0).float()

    def _on_device(self, loader: Iterable[Any]) -> Iterator[Batch]:
        """Yield the batches of a validation set, on the device."""
        plugin = self.trainer.precision_plugin
        for batch in loader:
            yield self.engine.batch_to_device(plugin.convert_input(batch))


def _name_followers(inputs: Tensor, targets: Tensor, num_inputs: Tensor) -> Tensor:
    """Return the token after each input, [R, T], `IGNORE_INDEX` after the last one unless it is a target."""
    after = torch.cat([inputs[:, 1:], torch.zeros_like(inputs[:, :1])], dim=1)  # [R, T]
    places = torch.arange(inputs.shape[1], device=inputs.device)  # [T]
    after = torch.where(places < num_inputs[:, None] - 1, after, IGNORE_INDEX)
    return torch.where(targets == IGNORE_INDEX, after, targets)
