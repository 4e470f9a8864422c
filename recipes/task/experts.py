"""Mixture-of-experts additions to a training step: auxiliary losses, load balancing and metrics."""

from typing import Any

import torch
from torch import Tensor, nn

from recipes.lightning_internals import is_accumulating
from recipes.model.moe.router import describe_loads
from recipes.numerics.loss import IGNORE_INDEX
from recipes.parallel.stages import list_stages
from recipes.task.base import TrainingTask


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

    def add_terms(self, objective: Tensor, *, stage: nn.Module, targets: Tensor) -> Tensor:
        """Return the objective of a micro-batch plus the auxiliary losses, summed over targets.

        Args:
            objective: Summed over targets, 0-dim.
            stage: Stage that computed the micro-batch; the whole model without pipeline parallelism.
            targets: [B, T].
        """
        model: Any = stage
        routed = model.take_routed()
        if routed is None or not torch.is_grad_enabled():
            return objective
        num_targets = (targets != IGNORE_INDEX).sum(dim=1)  # [B]
        weights = torch.stack([num_targets, num_targets, routed.num_tokens])  # [3, B]
        sums = (routed.terms * weights).sum(dim=-1)  # [L, 3]
        self._routed.append((routed.first_layer, routed.loads, sums.detach()))
        has_terms = model.router_aux_loss_coef or model.router_z_loss
        return objective + model.weigh_terms(sums) if has_terms else objective

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
        is_logged = step % trainer.log_every_n_steps == 0 or trainer.should_stop  # type: ignore[attr-defined]
        if not (is_balanced or is_logged):
            return
        # one collective: float64 represents counts exactly
        both = torch.cat([loads.double(), sums.double()], dim=1)  # [L, E + 3]
        both = trainer.strategy.sum_over_token_ranks(both)  # type: ignore[attr-defined]
        loads, sums = both[:, : model.num_experts], both[:, model.num_experts :]
        if is_balanced and not has_overflowed:
            for stage in list_stages(model):
                stage.balance_experts(loads)  # type: ignore[operator]
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
        strategy: Any = task.trainer.strategy
        if strategy.mesh.expert > 1:  # the other ranks wait for the most loaded one
            of_ranks, _ = describe_loads(loads.view(len(loads), strategy.mesh.expert, -1).sum(dim=-1))
            task.log_row({"moe/rank_load_max": of_ranks})
        if model.router_aux_loss_coef:
            task.log_row({"moe/load_balance_loss": balance / self._num_targets})
        if model.router_z_loss:
            task.log_row({"moe/router_z_loss": square / self._num_targets})
