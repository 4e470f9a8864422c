"""Next-token prediction, with a loss per token; with experts and in pipeline stages, too."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.lightning_internals import get_data, get_log_interval, is_accumulating, skip_backward
from recipes.loss import Term, add_up, detach, divide, logged_by_count
from recipes.metrics import ValidationMetrics
from recipes.model import LanguageModel
from recipes.model.moe.router import describe_loads
from recipes.numerics.collectives import reduce_parts
from recipes.numerics.head_loss import HeadLoss, cast_weight, split
from recipes.numerics.loss import IGNORE_INDEX, token_losses
from recipes.parallel.schedule import PipelineSchedule
from recipes.parallel.stages import PipelineRanks, list_stages
from recipes.parallel.tensor import TensorRanks
from recipes.task.base import Batch, TrainingTask
from recipes.task.generation import GeneratesText

# Training step under pipeline parallelism: all micro-batches of an optimizer step in one schedule.


class PipelineTask(TrainingTask, ABC):
    """A task on token sequences whose model may be a `StagedModel`.

    Attributes:
        stage_forward: Forward pass of the last pipeline stage, set while it computes the loss; None: the model's.
    """

    stage_forward: Callable[..., Any] | None = None

    @abstractmethod
    def own_tokens(self, batch: Batch) -> Batch:
        """Return a batch with this rank's shard of every sequence; `positions` still cover all tokens."""

    @abstractmethod
    def own_terms(self, batch: Batch) -> list[Term]:
        """Return the terms of a batch from `own_tokens`, without the auxiliary losses of the model's layers."""

    @abstractmethod
    def layer_terms(self, *, stage: nn.Module, targets: Tensor) -> list[Term]:
        """Return the auxiliary losses of the micro-batch that a stage's layers have just computed.

        Args:
            stage: Stage that computed the micro-batch; the whole model without pipeline parallelism.
            targets: [B, T].
        """

    def run_pipeline(self, batch: Batch, pipeline: PipelineSchedule) -> Tensor:
        """Compute the gradients of a whole step and return its loss; 0 on ranks without the last stage."""
        self.trainer.optimizers[0].zero_grad()
        own = self.own_tokens(batch)
        num_samples = len(own["inputs"])
        rows = {
            name: value
            for name, value in own.items()
            if name != "inputs" and isinstance(value, Tensor) and value.ndim and len(value) == num_samples
        }
        whole = {name: value for name, value in own.items() if name not in rows and name != "inputs"}
        logged: list[Term] = []
        # explicitly float32: bf16-true changes the default dtype
        zero = torch.zeros((), dtype=torch.float32, device=own["inputs"].device)

        def scale(terms: Sequence[Term]) -> Tensor:
            return self.engine.scale_loss(self.scale(terms, whole))

        def compute(forward: Callable[..., Any], hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
            self.stage_forward = forward
            try:
                terms = self.own_terms({**rest, **whole, "inputs": hidden})
            finally:
                self.stage_forward = None
            logged.extend(detach(term) for term in terms)
            last = list_stages(self.model)[-1]
            terms = terms + self.layer_terms(stage=last, targets=rest["targets"])
            return torch.stack([scale(terms)])  # not a view, which FSDP2 warns about

        def leave(stage: nn.Module, hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
            terms = self.layer_terms(stage=stage, targets=rest["targets"])
            if any(term.sum.requires_grad for term in terms):
                hidden = _Differentiate.apply(hidden, scale(terms))
            return hidden

        # on every rank: a loss scaler has no scale before its first call, and ranks without the loss unscale too
        nothing = Term(zero, per=self.loss.count_names[0])
        scale([nothing])
        pipeline.step(own["inputs"], rows, compute, leave)
        self._count(batch)
        # zero on ranks without the last stage, because losses are summed over pipeline ranks too
        terms = add_up(logged, zero) or [nothing]
        if "source" in own and not pipeline.has_last:
            self.add_sources(own, torch.zeros_like(own["targets"], dtype=torch.float32), counts=False)
        self._add_loss(terms, batch)
        return divide(logged_by_count(terms), batch)


class _Differentiate(torch.autograd.Function):
    """Identity on hidden states whose backward pass also starts backpropagation of a scalar term of the objective.

    A stage receives only the gradient of the hidden states that it sends; its own auxiliary losses need this path.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, terms: Tensor) -> Tensor:
        ctx.terms = terms.dtype, terms.device
        same: Tensor = torch.ops.aten._unsafe_view(hidden, hidden.shape)
        return same

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.terms
        return grad, torch.ones((), dtype=dtype, device=device)


# Mixture-of-experts additions to a training step: auxiliary losses, load balancing and metrics.


class Routing:
    """Routing statistics of the current optimizer step.

    Args:
        task: Task whose model has experts (`MoeLlama`).
    """

    def __init__(self, task: TrainingTask) -> None:
        self._task = task
        self._model: Any = task.model
        # current micro-batch, an entry per stage: first layer, loads [layers, E], sums [layers, 3]
        self._routed: list[tuple[int, Tensor, Tensor]] = []
        self._window_loads: Tensor | None = None  # [L, E] int64, tokens per expert in the current step
        self._window_sums: Tensor | None = None  # [L, 3], both losses over targets, entropy over tokens
        self._num_targets: Tensor | int = 0  # in the global batch

    def begin_training_step(self) -> None:
        """Discard statistics left by other callers of the objective."""
        self._routed = []

    def terms(self, *, stage: nn.Module, targets: Tensor) -> list[Term]:
        """Return the weighted auxiliary losses of a micro-batch, summed over targets.

        Args:
            stage: Stage that computed the micro-batch; the whole model without pipeline parallelism.
            targets: [B, T].
        """
        model: Any = stage
        routed = model.take_routed()
        if routed is None or not torch.is_grad_enabled():
            return []
        num_targets = (targets != IGNORE_INDEX).sum(dim=1)  # [B]
        weights = torch.stack([num_targets, num_targets, routed.num_tokens])  # [3, B]
        sums = (routed.terms * weights).sum(dim=-1)  # [L, 3]
        self._routed.append((routed.first_layer, routed.loads, sums.detach()))
        has_terms = model.router_aux_loss_coef or model.router_z_loss
        return [Term(model.weigh_terms(sums), in_loss=False)] if has_terms else []

    def end_training_step(self, num_targets: Tensor | int, device: torch.device) -> None:
        """Add the routing statistics of the training step to those of the current optimizer step.

        Args:
            num_targets: Number of targets in the global batch.
            device: Device of the loads.
        """
        if self._window_loads is None or self._window_sums is None:
            # on every rank, because all join the sum: the stages of this rank may have only layers without experts
            layers = self._model.num_routed_layers
            self._window_loads = torch.zeros(layers, self._model.num_experts, dtype=torch.int64, device=device)
            self._window_sums = torch.zeros(layers, 3, dtype=torch.float32, device=device)
        self._num_targets = num_targets
        for first, loads, sums in self._routed:
            here = slice(first, first + len(loads))  # the other layers are on other ranks
            self._window_loads[here] += loads
            self._window_sums[here] += sums
        self._routed = []

    def end_optimizer_step(self, *, has_overflowed: bool) -> None:
        """Balance the load of the experts once per step, and log it.

        The biases also change on a step that a guard skips; the guard's owner restores them with all other buffers.

        Args:
            has_overflowed: Whether the loss scaler skipped the step; the biases then stay unchanged.
        """
        if self._window_loads is None or self._window_sums is None or is_accumulating(self._task.trainer):
            return
        loads, sums = self._window_loads, self._window_sums
        self._window_loads = self._window_sums = None
        trainer, model = self._task.trainer, self._model
        step, is_balanced = trainer.global_step + 1, model.balance_rate > 0
        is_logged = step % get_log_interval(trainer) == 0 or trainer.should_stop
        if not (is_balanced or is_logged):
            return
        # one collective: float64 represents counts exactly
        both = torch.cat([loads.double(), sums.double()], dim=1)  # [L, E + 3]
        both = self._task.engine.sum_over_token_ranks(both)
        loads, sums = both[:, : model.num_experts], both[:, model.num_experts :]
        if is_balanced and not has_overflowed:
            stages: list[Any] = [*list_stages(model)]
            for stage in stages:
                stage.balance_experts(loads)
        if is_logged:
            self._log(loads, sums)

    def _log(self, loads: Tensor, sums: Tensor) -> None:
        """Log the loads of the least balanced layer, and means over layers.

        Args:
            loads: [L, E], summed over all ranks.
            sums: [L, 3], summed over all ranks.
        """
        task, model = self._task, self._model
        largest, smallest = describe_loads(loads)
        balance, square, entropy = sums.mean(dim=0).unbind()
        num_tokens = loads[0].sum() / model.num_experts_per_tok
        task.log_row({"moe/load_max": largest, "moe/load_min": smallest, "moe/router_entropy": entropy / num_tokens})
        num_expert_ranks = task.engine.mesh.expert
        if num_expert_ranks > 1:  # the other ranks wait for the most loaded one
            of_ranks, _ = describe_loads(loads.view(len(loads), num_expert_ranks, -1).sum(dim=-1))
            task.log_row({"moe/rank_load_max": of_ranks})
        if model.router_aux_loss_coef:
            task.log_row({"moe/load_balance_loss": balance / self._num_targets})
        if model.router_z_loss:
            task.log_row({"moe/router_z_loss": square / self._num_targets})


class LanguageModeling(GeneratesText, PipelineTask):
    """Trains a language model, tokens [B, T] -> logits [B, T, V]. Arguments: see `TrainingTask`."""

    input_kind: ClassVar[str] = "tokens"
    is_causal: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({"generate", "export", "evaluate_tasks", "pipeline"})

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = get_data(self.trainer)
        if data is None:
            return
        self.source = data.source
        self.tokenizer = self.source.tokenizer
        if getattr(self.source, "packs", False) or getattr(self.source, "packs_batches", False):
            self._check_positions(self.meta_model())

    def _check_positions(self, model: nn.Module) -> None:
        takes_positions = "positions" in inspect.signature(model.forward).parameters
        if not takes_positions or not getattr(model, "keeps_documents_apart", True):
            title = getattr(model, "title", type(model).__name__)
            why = "was not compared on them" if takes_positions else "takes no positions"
            reason = f"{title} {why}: packed examples would see each other"
            raise ConfigError("data.packing=true", reason, "data.packing=false")

    def _run(self, batch: Batch, **options: Any) -> Any:
        """Return the output of the model for a batch, whose rows may hold several documents."""
        if "positions" in batch:
            options["positions"] = batch["positions"]  # [B, T]
        if self._routing is not None and "num_inputs" in batch and torch.is_grad_enabled():
            options["num_inputs"] = batch["num_inputs"]  # [B]
        forward = self.stage_forward or self.model
        return forward(batch["inputs"], **options)

    @override
    def outputs(self, batch: Batch) -> Any:
        return self._run(batch)  # [B, T, V], compute dtype

    @functools.cached_property
    def takes_reduce(self) -> bool:
        """Whether the model passes hidden states and head weight to a function in the place of computing logits."""
        has_argument = "reduce" in inspect.signature(self.model.forward).parameters
        return has_argument and bool(getattr(self.model, "computes_loss_in_chunks", True))

    @functools.cached_property
    def _head_loss(self) -> HeadLoss | None:
        """Loss computed from chunks of the logits; None: disabled, or not supported by the model."""
        if not self.takes_reduce:
            return None
        ranks: TensorRanks | None = getattr(getattr(self.model, "head", None), "ranks", None)
        stages: PipelineRanks | None = getattr(self.model, "pipeline", None)
        head_loss = self.loss.in_chunks(
            cast(LanguageModel, self.model).vocab_size,
            vocabulary_group=None if ranks is None else ranks.group,
            retains_graph=stages is not None and stages.plan.schedule == "ZBVZeroBubble",
        )
        if head_loss is None:
            return None
        if self._compile_mode is not None:
            head_loss.compile()
        return head_loss

    @functools.cached_property
    def _routing(self) -> Routing | None:
        """Routing statistics of a model with experts; None: the model has none."""
        return Routing(self) if getattr(self.model, "routes_tokens", False) else None

    @property
    def _pipeline(self) -> PipelineSchedule | None:
        """Pipeline schedule of the stages; None without pipeline parallelism."""
        return self.engine.pipeline

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._pipeline is not None:
            skip_backward(self.trainer)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch; under pipeline parallelism, of the whole step."""
        if self._routing is not None:
            self._routing.begin_training_step()
        pipeline = self._pipeline
        loss = super().training_step(batch, batch_idx) if pipeline is None else self.run_pipeline(batch, pipeline)
        if self._routing is not None:
            self._routing.end_training_step(batch["num_targets"], loss.device)
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self._routing is None:
            super().optimizer_step(*args, **kwargs)
            return
        num_overflows = self.engine.num_overflows
        super().optimizer_step(*args, **kwargs)
        self._routing.end_optimizer_step(has_overflowed=self.engine.num_overflows != num_overflows)

    @override
    def terms(self, batch: Batch) -> list[Term]:
        own = self.own_tokens(batch)
        return self.own_terms(own) + self.layer_terms(stage=self.model, targets=own["targets"])

    @override
    def own_tokens(self, batch: Batch) -> Batch:
        ranks = getattr(self.model, "context", None)
        if ranks is None:
            return batch
        return batch | {name: ranks.own_tokens(batch[name], dim=1) for name in ("inputs", "targets")}  # [B, t]

    @override
    def layer_terms(self, *, stage: nn.Module, targets: Tensor) -> list[Term]:
        return [] if self._routing is None else self._routing.terms(stage=stage, targets=targets)

    @override
    def own_terms(self, batch: Batch) -> list[Term]:
        if self._head_loss is None:
            return super().terms(batch)
        scale = None
        if self.scales_loss and torch.is_grad_enabled():
            unscaled = torch.ones((), device=batch["inputs"].device) * (self._undo_division() / batch["num_targets"])
            scale = self.engine.scale_loss(unscaled)
        reduce = functools.partial(self._head_loss, targets=batch["targets"], scale=scale)
        objective, loss, by_token = self._run(batch, reduce=reduce)
        if "source" in batch:
            self.add_sources(batch, by_token)
        return [Term(objective, in_loss=loss)]

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = self.own_tokens(batch)
        if self._pipeline is not None and not self._pipeline.has_last:
            self._run(batch)  # only ranks with the last stage compute metrics
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
        """Add a batch to validation metrics in chunks of tokens and return the loss of each target, [B, T].

        Args:
            head_loss: Chunked loss of this task.
            hidden: [B, T, W], input of the head.
            weight: [V, W], weight of the head, with padding.
            targets: [B, T].
            metrics: Metrics of the current validation set.
        """
        flat, flat_targets = hidden.flatten(0, -2), targets.flatten()  # [B T, W], [B T]
        weight = cast_weight(weight)
        losses = []
        for part in split(len(flat), head_loss.chunk_tokens):
            logits = head_loss.logits(flat[part], weight)  # [n, V], compute dtype
            losses.append(token_losses(logits, flat_targets[part]))  # [n]
            metrics.update([Term(losses[-1].sum())], outputs=logits, batch={"targets": flat_targets[part]})
        return torch.cat(losses).view_as(targets)

    @override
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
