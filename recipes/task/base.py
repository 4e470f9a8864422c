"""Training step shared by all tasks: exact gradient accumulation, clipping, sample counters and logging."""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import lightning.pytorch as lightning
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric
from typing_extensions import override

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.blocks import list_blocks, named_blocks
from recipes.clipping import Clipping
from recipes.clipping.none import NoClipping
from recipes.compile import CompilationCounter, compile_blocks, is_compiled
from recipes.data.batches import sum_counts
from recipes.engine import StepGuard
from recipes.errors import ConfigError
from recipes.lightning_internals import get_data, get_log_interval
from recipes.loss import Loss, Term, divide, get_count, logged_by_count, sum_by_count
from recipes.metrics import ValidationMetrics
from recipes.model.flops import CountsFlops
from recipes.model.norm import join_ranks
from recipes.model.weights import await_checkpoint, initialize
from recipes.numerics.collectives import average_over_ranks
from recipes.numerics.ema import average_weights
from recipes.numerics.loss import sum_by_source, token_losses
from recipes.optimizer import hold_averages
from recipes.optimizer.param_groups import hold_bounds
from recipes.scheduler import Plateau
from recipes.task.frozen import FrozenModel, naming
from recipes.task.resumable import OnEngine, Resumable

Batch = dict[str, Any]

# Validation shared by all tasks: loss and metrics per validation set and per source of a mixture.


class Validated(OnEngine):
    """A task that computes metrics over one or more validation sets, reduced over all ranks.

    Args:
        loss: What is trained on and validated, as sums and counts.
        metrics: Validation metrics in addition to those of the loss, by name without `val/`.
        **settings: Arguments of the next base class.

    Attributes:
        loss: As above.
        val_metrics: Metrics of the validation split; those of additional sets are in `eval_metrics`.
        source_names: Sources of a mixture, whose losses are logged separately; set before the first step.
    """

    model: nn.Module

    def __init__(self, *, loss: Loss, metrics: Mapping[str, Metric], **settings: Any) -> None:
        super().__init__(**settings)
        self.loss = loss
        self._metrics = metrics
        self.name_data(sources=(), further=())

    def name_data(self, *, sources: Sequence[str], further: Sequence[str], group: Any = None) -> None:
        """Set the names of a mixture's sources and of the additional validation sets.

        Args:
            sources: Names of the sources.
            further: Names of the additional validation sets.
            group: Process group of ranks with different tokens; None: all ranks.
        """
        self.source_names = sources
        self.val_metrics = ValidationMetrics(self._metrics, loss=self.loss, sources=sources, group=group)
        self.eval_metrics = [
            ValidationMetrics(
                {key: metric.clone() for key, metric in self._metrics.items()}, loss=self.loss, split=name, group=group
            )
            for name in further
        ]

    @override
    def setup(self, stage: str) -> None:
        data = get_data(self.trainer)
        if data is not None:
            further = getattr(data, "eval_names", ())  # a user-defined data module has none
            sources = getattr(data.source, "source_names", ())
            self.name_data(sources=sources, further=further, group=self.engine.groups.tokens)

    def list_measures(self) -> dict[str, bool | None]:
        """Return the names of what says how good a model is, each with whether a higher value is better; None: neither.

        Those of validations, and of the training loss if a lower one is not better.
        """
        found: dict[str, bool | None] = {}
        for metrics in (self.val_metrics, *self.eval_metrics):
            found |= metrics.directions
        return found

    @abstractmethod
    def outputs(self, batch: Batch) -> Any:
        """Return what the loss reads of the model's answer to a batch: outputs [B, …, V] in compute dtype."""

    def _without_padding(self, outputs: Tensor) -> Tensor:
        """Return a view of outputs [..., V] without padding columns."""
        return outputs[..., : self.loss.num_outputs]

    @override
    def on_validation_epoch_start(self) -> None:
        for metrics in (self.val_metrics, *self.eval_metrics):
            metrics.reset()
        self.share_statistics()
        hold_averages(self.trainer.optimizers, self.model, held=True)

    def share_statistics(self) -> None:
        """Average running statistics over ranks, because each rank has updated them with its own samples."""
        saved = self.state_dict(keep_vars=True)  # excludes constant tables, which are not persistent
        buffers = (buffer for name, buffer in self.named_buffers() if name in saved)
        average_over_ranks((buffer for buffer in buffers if buffer.is_floating_point()), self.engine.groups.stage)

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._validate(batch, dataloader_idx)

    def _validate(self, batch: Batch, dataloader_idx: int) -> Any:
        """Add a batch to the metrics of its validation set; return the outputs."""
        metrics = self._metrics_of(dataloader_idx)
        outputs = self.outputs(batch)
        metrics.update(self.loss(outputs, batch), outputs=self._without_padding(outputs), batch=batch)
        if "source" in batch and metrics is self.val_metrics:
            losses = token_losses(self._without_padding(outputs), batch["targets"])
            metrics.update_sources(losses, batch["targets"], batch["source"])
        return outputs

    def _metrics_of(self, dataloader_idx: int) -> ValidationMetrics:
        return self.eval_metrics[dataloader_idx - 1] if dataloader_idx else self.val_metrics

    @override
    def on_validation_epoch_end(self) -> None:
        hold_averages(self.trainer.optimizers, self.model, held=False)
        found: dict[str, float] = {}
        for metrics in (self.val_metrics, *self.eval_metrics):
            found |= metrics.compute()
        found |= self.further_measures()
        self.log_dict(found)
        self.validated(found)

    def further_measures(self) -> Mapping[str, float]:
        """Return what the validation that ends has found beside losses and metrics, the same on all ranks."""
        return {}

    def validated(self, found: Mapping[str, float]) -> None:
        """Take in what a validation has found, the same on all ranks."""


LOGGER = logging.getLogger("lightning_recipes")


class TrainingTask(CountsFlops, Validated, Resumable, ABC):
    """A model, its optimizer and schedule, and the loss as a sum over targets.

    Args:
        make_model: Constructs the model; called under the meta device.
        make_optimizer: model -> optimizer.
        schedule: Optimizer step, from 0 -> multiplier of the peak learning rate.
        convert_model: (model on the meta device, shards_weights=bool); prepares the model for the run's precision.
        activation_checkpoint: Which blocks are recomputed in the backward pass.
        compile_mode: `mode` of `torch.compile` for blocks and loss, the largest elementwise operation; None: eager.
        loss: What is trained on, as sums and the counts that divide them.
        scales_loss: Whether the run uses a loss scaler.
        clipping: Adaptive limit of the gradient norm, in addition to the fixed one.
        ema_decay: Decay of the EMA of the weights, kept in the optimizer state; None disables it.
        seed: Seed of the initial weights and of each rank's RNG state.
        metrics: Validation metrics in addition to `val/loss`, by name without `val/`.
        frozen_models: Models beside the trained one, by their section of the config.

    Attributes:
        input_kind: Kind of its samples, that of the model and the data, or several kinds.
        has_fixed_shapes: Whether all its batches have one shape, so that trying algorithms for it, and
            compiling for it alone, pays.
        is_causal: Whether what it predicts at a position depends on the inputs up to there only.
        supports: What modes and settings may ask of it, see `recipes.config.traits.TaskTraits`.
        frozen_sections: Sections of the config with the models that it asks and never trains.
        frozen_models: These models while the run trains, in eval mode. They are no modules of the task, so that nothing
            that reads its parameters has them: optimizer, gradient norm, checkpoints, snapshots and averages.
        check_room: Raises if a model without storage cannot fit; called before it is allocated.
        num_forward_passes: Forward passes over each micro-batch of a step.
        training_measures: What terms that the task adds to those of the loss are logged as -> their counts.
        recipes_row: Metrics of the current step, including those that callbacks add; logged at the end of the step.
    """

    input_kind: ClassVar[str | tuple[str, ...]]
    has_fixed_shapes: ClassVar[bool] = False
    is_causal: ClassVar[bool] = False
    supports: ClassVar[frozenset[str]] = frozenset({"export"})
    frozen_sections: ClassVar[tuple[str, ...]] = ()
    num_forward_passes: ClassVar[int] = 1
    training_measures: ClassVar[Mapping[str, str]] = {}
    model: nn.Module

    def __init__(
        self,
        *,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[..., torch.optim.Optimizer],
        schedule: Callable[[int], float],
        convert_model: Callable[..., None],
        activation_checkpoint: ActivationCheckpoint,
        compile_mode: str | None,
        loss: Loss,
        scales_loss: bool,
        clipping: Clipping,
        ema_decay: float | None,
        seed: int,
        metrics: Mapping[str, Metric],
        frozen_models: Mapping[str, FrozenModel] = MappingProxyType({}),
    ) -> None:
        super().__init__(loss=loss, metrics=metrics, seed=seed, clipping=clipping, keeps_average=ema_decay is not None)
        self.frozen_models: dict[str, nn.Module] = {}
        self._frozen = frozen_models
        self._ema_decay = ema_decay
        self._make_model = make_model
        self._make_optimizer = make_optimizer
        self._schedule = schedule
        self._convert_model = convert_model
        self._activation_checkpoint = activation_checkpoint
        self._compile_mode = compile_mode
        self.scales_loss = scales_loss
        self.check_room: Callable[[nn.Module], None] = lambda model: None
        self.recipes_row: dict[str, float | Tensor] = {}
        self._micro_batches_in_window = self._window_samples = self._window_tokens = 0
        self._window_batches: list[Batch] = []  # of a task that looks ahead
        self._window_loss: Tensor | None = None
        self._unlogged_loss: Tensor | None = None  # of the last step, if its number does not make it a logged one
        self._window_measures: dict[str, Tensor] = {}  # name -> [], what the loss logs beside itself
        self._window_sources: Tensor | None = None  # [2, K], summed loss and targets of each source of a mixture

    def terms(self, batch: Batch) -> list[Term]:
        """Return the terms of the training objective of a micro-batch."""
        outputs = self.outputs(batch)
        if "source" in batch:
            self.add_sources(batch, token_losses(self._without_padding(outputs).detach(), batch["targets"]))
        return self.loss(outputs, batch)

    def recipes_generate_text(self, *prompt: Any, **options: Any) -> str | None:
        """Return None: a task generates no text unless it says so, and the sampling callback need not warn of that."""
        return None

    def recipes_sample_losses(self, batch: Batch) -> Tensor:
        """Return the mean loss of each sample over its targets, [B] float32."""
        return self.loss.per_sample(self.outputs(batch), batch)

    def predictions(self, batch: Batch) -> dict[str, Tensor]:
        """Return what `mode=predict` writes of each sample of a batch, by column, [B, …]."""
        return {"loss": self.recipes_sample_losses(batch)}

    def add_sources(self, batch: Batch, losses: Tensor, *, counts: bool = True) -> None:
        """Add the losses of a micro-batch to the per-source sums of the step.

        Args:
            batch: Micro-batch of a mixture.
            losses: [B, T] loss of each target, without regularizers.
            counts: False adds zeros, for a rank that computes no loss but joins the sum over ranks.
        """
        added = sum_by_source(losses, batch["targets"], batch["source"], num_sources=len(self.source_names)) * counts
        self._window_sources = added if self._window_sources is None else self._window_sources + added

    @override
    def configure_model(self) -> None:
        """Build the model on the meta device and let the engine materialize and initialize it."""
        if hasattr(self, "model"):  # Lightning calls this hook for every fit, validate and test
            return
        # Lightning calls it with the GPU as the default device, but under some strategies only. Here a tensor whose
        # device is not named is on the host: initial values are drawn there, the same ones for every device.
        with torch.device("cpu"):
            self._configure_model()

    def _configure_model(self) -> None:
        model = self.meta_model()
        self.prepare_first_weights(model)
        self._convert_model(model, shards_weights=self.engine.shards_weights)
        join_ranks(model, self.engine.groups.data)
        if self._activation_checkpoint.changes_blocks:  # not every model has blocks
            self._activation_checkpoint.apply(list_blocks(model))
        if self._compile_blocks(model):
            self.loss.compile()
        self.loss.num_outputs = getattr(model, "vocab_size", None)
        self.model_name = getattr(model, "title", type(model).__name__)  # before an engine may change its class
        first_weights = await_checkpoint if self.awaits_checkpoint else initialize
        frozen = [each.on_meta() for each in self._frozen.values()] if self.trainer.training else []
        self.check_room(nn.ModuleList([model, *frozen]) if frozen else model)
        initialize_part = functools.partial(first_weights, seed=self.seed)
        self.model = self.engine.materialize(model, initialize_part)
        self.remember_base()
        if self.trainer.training:
            self.hold_frozen_models()

    def hold_frozen_models(self) -> None:
        """Give the frozen models beside the trained one storage and weights, for whoever computes the objective.

        Collective.
        """
        init_context = self.trainer.precision_plugin.module_init_context
        for name, frozen in self._frozen.items():
            with torch.inference_mode(False), init_context(), torch.device("cpu"):
                model = self._materialize_frozen(frozen)
            self.frozen_models[name] = model
            self.remember_frozen_model(name, model, frozen)

    @property
    def make_frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """Constructors of the frozen models beside the trained one, by name."""
        return {name: frozen.make for name, frozen in self._frozen.items()}

    @override
    def meta_frozen_models(self) -> list[nn.Module]:
        return [frozen.on_meta() for frozen in self._frozen.values()]

    def _compile_blocks(self, model: nn.Module) -> bool:
        """Compile the blocks of a model if the run compiles; return whether it did."""
        if self._compile_mode is None or not named_blocks(model):
            return False
        compile_blocks(
            list_blocks(model),
            mode=self._compile_mode,
            leaves_out_hooks=self.engine.gathers_by_hooks,
            has_fixed_shapes=self.has_fixed_shapes,
        )
        return True

    def _materialize_frozen(self, frozen: FrozenModel) -> nn.Module:
        """Return a frozen model as the engine holds it, with its weights, whatever a checkpoint holds."""
        model = frozen.on_meta()
        if frozen.is_copy:
            self.prepare_weights_of_copy(model)
        self._convert_model(model, shards_weights=self.engine.shards_weights)
        self._compile_blocks(model)
        model.requires_grad_(False)
        with naming(frozen.section):
            initialize_part = functools.partial(initialize, seed=self.seed)
            placed = self.engine.materialize(model, initialize_part, is_trained=False)
        return placed.requires_grad_(False).eval()

    def meta_model(self) -> nn.Module:
        """Return an unsharded model without storage."""
        with torch.device("meta"):
            return self._make_model()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        try:
            optimizer = self._make_optimizer(self.model)
        except ValueError as error:  # from the argument checks in torch
            raise ConfigError("optimizer=…", str(error), "optimizer.<setting>=<value>, or another optimizer") from error
        self.remember_optimizer(optimizer)
        optimizer = self.engine.prepare_optimizer(optimizer)
        self.remember_hyperparameters(optimizer)
        hold_bounds(optimizer)  # before the average, which is of the weights that are kept
        if self._ema_decay is not None:
            average_weights(optimizer, decay=self._ema_decay, step=lambda: self.trainer.global_step)
        # a partial function, since the state of any other object would be in the checkpoint
        scheduler = LambdaLR(optimizer, functools.partial(self._schedule))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @override
    def on_train_start(self) -> None:
        assert not self.awaits_checkpoint, "the weights of a checkpoint were to follow, and none was loaded"
        adaptive = None if isinstance(self.clipping, NoClipping) else self.clipping
        self.engine.clipping = adaptive
        self.resume_optimizer(self._schedule)

    # A schedule that follows a metric of validation.

    @override
    def validated(self, found: Mapping[str, float]) -> None:
        trainer, schedule, step = self.trainer, self._schedule, self.trainer.global_step
        if not isinstance(schedule, Plateau) or trainer.state.fn != TrainerFn.FITTING:
            return
        every = trainer.val_check_batch  # micro-batches
        assert every is not None
        if step * trainer.accumulate_grad_batches % every:
            return  # only because the run ends here, and one with more steps has no validation here
        if schedule.monitor not in found:
            fix = f"scheduler.monitor=<{' | '.join(found)}>"
            raise ConfigError(f"scheduler.monitor={schedule.monitor}", "the task computes no such metric", fix)
        if schedule.add(step, found[schedule.monitor]):
            self._apply_schedule()
            if trainer.is_global_zero:
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                LOGGER.info(f"Step {step}: {schedule.monitor} no longer improves, the learning rate is now {rate:.3g}")

    def _apply_schedule(self) -> None:
        """Set the rates of the next step, for which Lightning has already asked the schedule."""
        scheduler: Any = self.lr_schedulers()
        for group, base in zip(self.trainer.optimizers[0].param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = base * self._schedule(scheduler.last_epoch)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if isinstance(self._schedule, Plateau):
            checkpoint["schedule"] = self._schedule.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if isinstance(self._schedule, Plateau) and "schedule" in checkpoint:  # the run may have had another one
            self._schedule.load_state_dict(checkpoint["schedule"])

    @override
    def on_rollback(self, trainer: lightning.Trainer, pl_module: Any, from_step: int, to_step: int) -> None:
        super().on_rollback(trainer, pl_module, from_step, to_step)
        if isinstance(self._schedule, Plateau):
            # the snapshot is of before the validation of its step
            self._schedule.rewind(to_step)
            self._apply_schedule()

    @property
    def looks_ahead(self) -> bool:
        """Whether it reads all micro-batches of a step before the first; the data stream then keeps them."""
        return type(self).before_window is not TrainingTask.before_window

    def before_window(self, micro_batches: list[Batch]) -> list[Batch]:
        """Look at all micro-batches of this rank before the first forward pass of an optimizer step.

        Override it for what depends on the whole global batch, such as features that every sample is compared with or a
        statistic over all samples: forward passes without gradients, collectives and generation are allowed, and every
        rank calls it. It runs in the precision of the run, in training mode. A task that does not override it reads
        nothing ahead. Values are the same for every split only if they are those of the global batch.

        Args:
            micro_batches: On the device; under pipeline parallelism one, with the samples of all micro-batches.

        Returns:
            The micro-batches to train on, with what was computed added to each: tensors with one row per sample, or
            values for the whole batch. The loss counts these.
        """
        return micro_batches

    def before_split(self, batches: Iterator[Batch]) -> None:
        """Look at all batches of a split, on the device, before the losses of its samples are computed one by one.

        Override it, like `before_window`, for what depends on all samples.
        """

    def _begin_window(self) -> None:
        """Call `before_window`, and count what it returns."""
        engine, plugin = self.engine, self.trainer.precision_plugin
        window = get_data(self.trainer).window
        moved = [engine.batch_to_device(plugin.convert_input(batch)) for batch in window]
        with plugin.train_step_context():
            micro_batches = self.before_window(moved)
        counts = [self.loss.counts(batch) for batch in micro_batches]
        totals = sum_counts(counts, engine.sum_over_data_ranks)
        self._window_batches = [{**batch, **totals} for batch in micro_batches]

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.looks_ahead:
            if self._micro_batches_in_window == 0:
                self._begin_window()
            batch |= self._window_batches[self._micro_batches_in_window]  # in place: Lightning passes it on
        if self._compile_mode == "reduce-overhead":  # CUDA graphs may now overwrite outputs of the last micro-batch
            torch.compiler.cudagraph_mark_step_begin()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, scaled so that accumulated gradients equal those of the global batch.

        Each sum of the loss is divided by its count in the global batch, which every micro-batch holds under the name
        of the count. A mean of micro-batch means would weight targets unequally.
        """
        terms = self.terms(batch)
        self._count(batch)
        self._add_loss(terms, batch)
        return self.scale(terms, batch)

    def scale(self, terms: Sequence[Term], batch: Batch) -> Tensor:
        """Return the objective of a micro-batch, divided by the counts of the global batch, 0-dim.

        Engines and Lightning average over ranks and micro-batches; the factor undoes that.
        """
        parts = [
            sums * (self._undo_division() / get_count(batch, per, sums)) for per, sums in sum_by_count(terms).items()
        ]
        scaled: Tensor = functools.reduce(torch.add, parts)
        return scaled

    def _add_loss(self, terms: Sequence[Term], batch: Batch) -> None:
        """Add the loss of a micro-batch to that of the step; log the step after its last micro-batch."""
        loss = divide(logged_by_count(terms), batch)  # [], contribution of this micro-batch to the loss of the step
        self._window_loss = loss if self._window_loss is None else self._window_loss + loss
        for term in terms:
            if term.logged_as is not None:
                part = term.sum.detach() / get_count(batch, term.per, term.sum)
                earlier = self._window_measures.get(term.logged_as)
                self._window_measures[term.logged_as] = part if earlier is None else earlier + part
        if self._micro_batches_in_window == self.trainer.accumulate_grad_batches:
            # before the backward pass: the guard needs the loss of the step when gradients are clipped
            self._end_window()

    def _undo_division(self) -> int:
        """Return the factor that cancels the averaging over micro-batches (Lightning) and ranks (engines)."""
        return self.trainer.accumulate_grad_batches * self.engine.averaged_size

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.engine.frees_gradients)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Compute the norm and clip in one pass; Lightning 2.6's hook rejects fused AdamW under bf16-mixed (#21435)."""
        by_value = gradient_clip_algorithm == "value"
        self.engine.clip_gradients(
            self.parameters(),
            max_norm=None if by_value else gradient_clip_val,
            max_value=gradient_clip_val if by_value else None,
        )

    def recipes_guard_steps(self, guard: StepGuard) -> None:
        """Let `guard` decide before each optimizer step whether to skip it."""
        self.engine.guard = guard

    @property
    def clip_threshold(self) -> Tensor | None:
        """Clipping threshold of the last step, a 0-dim tensor; inf: no limit."""
        return self.engine.clip_threshold

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm of the last optimizer step before clipping, a 0-dim tensor."""
        return self.engine.grad_norm

    @property
    @override
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, with different samples."""
        return self.engine.data_size

    def _count(self, batch: Batch) -> None:
        num_samples = batch["num_samples"] * self.data_size
        self._window_samples += num_samples
        # rows with padding: counted by the data stream, because rows on other ranks have other lengths
        self._window_tokens += batch.get("num_tokens", num_samples * self._tokens_per_sample(batch))
        self._micro_batches_in_window += 1

    def _tokens_per_sample(self, batch: Batch) -> int:
        return 0

    def _end_window(self) -> None:
        """Log loss and learning rates of the upcoming optimizer step.

        The loss is summed over ranks only when needed: on logged steps, and on every step with a guard.
        """
        trainer, window_loss, sources = self.trainer, self._window_loss, self._window_sources
        self.num_samples += self._window_samples
        self.num_tokens += self._window_tokens
        self._window_samples = self._window_tokens = self._micro_batches_in_window = 0
        self._window_loss = self._window_sources = None
        measures, self._window_measures = self._window_measures, {}
        step = trainer.global_step + 1
        if step == trainer.max_steps:
            trainer.should_stop = True  # makes Lightning log and validate the last step regardless of the intervals
        guard = self.engine.guard
        is_logged = step % get_log_interval(trainer) == 0 or trainer.should_stop
        self._unlogged_loss = None if is_logged else window_loss
        if window_loss is None or not (is_logged or guard is not None):
            return
        loss = self._sum_over_token_ranks(window_loss)
        if guard is not None:
            guard.loss = loss
        if not is_logged:
            return
        self._log_step(loss)
        if self.loss.measures or self.training_measures:
            self._log_measures(measures)
        if sources is not None:
            self._log_sources(self._sum_over_token_ranks(sources))

    def recipes_log_last_step(self) -> None:
        """Log loss and learning rates of the last step if it turned out to be the last one after it was computed.

        A time limit or a validation may end a run at a step that was not to be logged. A collective.
        """
        loss, self._unlogged_loss = self._unlogged_loss, None
        if loss is not None:
            self._log_step(self._sum_over_token_ranks(loss))

    def _log_step(self, loss: Tensor) -> None:
        self.log_row({"train/loss": loss, "train/samples": self.num_samples})
        if self.num_tokens:
            self.log_row({"train/tokens": self.num_tokens})
        self.log_row(dict(self._learning_rates()))

    def _log_measures(self, of_rank: Mapping[str, Tensor]) -> None:
        """Log what loss and task measure beside the loss, summed over ranks in one collective for all of them."""
        names = [*self.loss.measures, *self.training_measures]
        zero = torch.zeros((), device=self.device)
        sums = torch.stack([of_rank.get(name, zero).float() for name in names])  # [K]
        values = self._sum_over_token_ranks(sums).unbind()
        logged = {name if "/" in name else f"train/{name}": value for name, value in zip(names, values, strict=True)}
        self.log_row(logged)

    def _log_sources(self, totals: Tensor) -> None:
        """Log loss and consumed tokens of each source of a mixture; no loss for a source without targets in this step.

        Args:
            totals: [2, K], summed loss and targets over all ranks.
        """
        found = zip(self.source_names, *totals.tolist(), strict=True)
        self.log_row({f"train/{name}/loss": loss_sum / count for name, loss_sum, count in found if count})
        tokens = get_data(self.trainer).count_source_tokens()
        self.log_row({f"train/{name}/tokens": count for name, count in tokens.items()})

    def log_row(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Add metrics to the row of this step, which `RowWriter` logs at the end of the step."""
        self.recipes_row |= metrics

    def _learning_rates(self) -> Iterator[tuple[str, float]]:
        groups = self.trainer.optimizers[0].param_groups
        yield "lr", groups[0]["lr"]
        if len({group["lr"] for group in groups}) > 1:
            for group in groups:
                yield f"lr/{group['group_name']}", group["lr"]

    def _sum_over_token_ranks(self, value: Tensor) -> Tensor:
        return self.engine.sum_over_token_ranks(value)


class CompilationLog(lightning.Callback):
    """Logs what torch.compile did while a model with compiled blocks was trained."""

    def __init__(self) -> None:
        self._counter = CompilationCounter()

    @override
    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # blocks compile at their first call, which is in training or in a callback that runs the model before it
        if any(map(is_compiled, pl_module.modules())):
            self._counter.attach()

    @override
    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._counter.is_attached and trainer.is_global_zero:
            LOGGER.info(self._counter.describe())
        self._counter.detach()

    @override
    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._counter.detach()
