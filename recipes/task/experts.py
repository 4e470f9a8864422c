"""What a step of a model with experts adds to any other: terms of the objective, the balance of the load, metrics."""

from abc import ABC
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.lightning_internals import is_accumulating
from recipes.model.moe.router import describe_loads
from recipes.numerics.loss import IGNORE_INDEX
from recipes.parallel.stages import list_stages
from recipes.task.base import Batch
from recipes.task.divided import DividedTask


class TrainsExperts(DividedTask, ABC):
    """A task whose model may have experts (`MoeLlama`); for any other it does nothing."""

    # of the training step under way, by its layers: the first, counts [layers, E], sums [layers, 3]
    _routed: list[tuple[int, Tensor, Tensor]]
    _window_counts: Tensor | None = None  # [L, E] int64, tokens of each expert in the step under way
    _window_sums: Tensor | None = None  # [L, 3] of both losses over targets, and of the entropy over tokens

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._routed = []

    @override
    def add_terms(self, objective: Tensor, *, stage: nn.Module, targets: Tensor) -> Tensor:
        """Return the objective with the terms of the routing, summed over targets as the loss is."""
        model: Any = stage
        routed = model.take_routed() if hasattr(model, "take_routed") else None
        if routed is None or not torch.is_grad_enabled():
            return objective
        num_targets = (targets != IGNORE_INDEX).sum(dim=1)  # [B]
        num_tokens = torch.full_like(num_targets, targets.shape[1])
        sums = (routed.terms * torch.stack([num_targets, num_targets, num_tokens])).sum(dim=-1)  # [L, 3]
        self._routed.append((routed.first_layer, routed.counts, sums.detach()))
        has_terms = model.load_balance_loss or model.router_z_loss
        return objective + model.weigh_terms(sums) if has_terms else objective

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._routed = []  # other callers of the objective leave theirs
        loss = super().training_step(batch, batch_idx)
        model: Any = self.model
        if not getattr(model, "routes_tokens", False):
            return loss
        if self._window_counts is None or self._window_sums is None:
            # on every rank, which all join the sum: the stages of this one may have only layers without experts
            layers, device = model.num_routed_layers, loss.device
            self._window_counts = torch.zeros(layers, model.num_experts, dtype=torch.int64, device=device)
            self._window_sums = torch.zeros(layers, 3, dtype=torch.float32, device=device)
        self._num_targets = batch["num_targets"]  # of the global batch
        for first, counts, sums in self._routed:
            here = slice(first, first + len(counts))  # others are on other ranks
            self._window_counts[here] += counts
            self._window_sums[here] += sums
        self._routed = []
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then balance the load of the experts: once a step, and not where an overflow skipped it.

        A step that a guard refuses moves the biases, too; with all other buffers, the guard's owner restores them.
        """
        strategy: Any = self.trainer.strategy
        num_overflows = strategy.num_overflows
        super().optimizer_step(*args, **kwargs)
        if self._window_counts is None or self._window_sums is None or is_accumulating(self.trainer):
            return
        counts, sums = self._window_counts, self._window_sums
        self._window_counts = self._window_sums = None
        model: Any = self.model
        step, is_balanced = self.trainer.global_step + 1, model.balance_rate > 0
        is_logged = step % self.trainer.log_every_n_steps == 0 or self.trainer.should_stop  # type: ignore[attr-defined]
        if not (is_balanced or is_logged):
            return
        # one sum: float64 holds counts exactly
        both = self._sum_over_token_ranks(torch.cat([counts.double(), sums.double()], dim=1))  # [L, E + 3]
        counts, sums = both[:, : model.num_experts], both[:, model.num_experts :]
        if is_balanced and strategy.num_overflows == num_overflows:
            for stage in list_stages(self.model):
                stage.balance_experts(counts)  # type: ignore[operator]
        if is_logged:
            self._log_routing(counts, sums)

    def _log_routing(self, counts: Tensor, sums: Tensor) -> None:
        """Log loads of the layer where they are most uneven, and means over layers.

        Args:
            counts: [L, E], over all ranks.
            sums: [L, 3], likewise.
        """
        model: Any = self.model
        largest, smallest = describe_loads(counts)
        balance, square, entropy = sums.mean(dim=0).unbind()
        num_tokens = counts[0].sum() / model.num_experts_per_token
        self.log_row({"moe/load_max": largest, "moe/load_min": smallest, "moe/router_entropy": entropy / num_tokens})
        strategy: Any = self.trainer.strategy
        if strategy.mesh.expert > 1:  # the others wait for the rank with most
            of_ranks, _ = describe_loads(counts.view(len(counts), strategy.mesh.expert, -1).sum(dim=-1))
            self.log_row({"moe/rank_load_max": of_ranks})
        if model.load_balance_loss:
            self.log_row({"moe/load_balance_loss": balance / self._num_targets})
        if model.router_z_loss:
            self.log_row({"moe/router_z_loss": square / self._num_targets})
