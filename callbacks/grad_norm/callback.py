"""Log the gradient norm before clipping, also by block; free if the engine provides it, else one pass per log."""

import logging
import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..lightning_packages import Callback, find_classes
from ..logged_step import StepCounter, completed_steps, is_logged_step, log_row
from ..protocols import KeepsGradNorm, SupportsCompletions
from ..ranks import gather_objects

log = logging.getLogger("lightning_recipes")
_NO_LIMIT = 1e6  # logged for an infinite threshold: a curve cannot show infinity
_NO_SPREAD = "in no group of completions do the rewards differ: all are right, or all wrong, and nothing is learned"


class GradNormMonitor(Callback):
    """Logs `grad/norm` and `grad/clipped_fraction` at logged steps.

    Useful in every run: a rising norm is the earliest sign of divergence, and a run that clips most of its steps
    effectively trains with a smaller learning rate than the configured one.

    If the strategy is a `KeepsGradNorm`, its norm is logged. Otherwise the norm is computed in
    `on_before_optimizer_step`: at logged steps, and at every step if `trainer.gradient_clip_val` clips by norm. A
    module with several optimizers logs `grad/norm/optimizer_0`, `grad/norm/optimizer_1` and so on instead of
    `grad/norm`, for those that stepped in the logged batch. Under Lightning's own FSDP1 and DeepSpeed strategies, which
    do not expose their sharded gradients, no norm is logged: the norm of one rank's shard is not the global norm.

    `grad/clipped_fraction` is the fraction of optimizer steps since the last row whose norm exceeded
    `trainer.gradient_clip_val`, counted on the device. A threshold that changes from step to step is read from the
    strategy and logged as `grad/clip_threshold`.

    Warns once, at a logged step, when the norm vanishes or keeps rising; warns again only after it has recovered. For a
    module that is a `SupportsCompletions`, whose single steps have no gradient when all rewards of each group are
    equal, it says so once.

    Args:
        per_block: Also log `grad/norm/<block>` before clipping: one pass and one sum over ranks per block. Not
            available under FSDP1 or DeepSpeed.
        vanishing: Warn below this norm.
        rising: Warn when the median of recent norms exceeds the lowest median so far by this factor.

    Raises:
        ValueError: `vanishing` is below 0, or `rising` is not above 1.

    Example:
        >>> monitor = GradNormMonitor(per_block=True)
        >>> trainer = Trainer(callbacks=[monitor], gradient_clip_val=1.0, accelerator="cpu", logger=False)
        >>> monitor.state_dict()["num_clipped"]
        0
    """

    def __init__(
        self,
        *,
        per_block: bool = False,
        vanishing: Annotated[float, ">= 0"] = 1e-7,
        rising: Annotated[float, "> 1"] = 30.0,
    ) -> None:
        super().__init__()
        if not vanishing >= 0:
            raise ValueError(f"vanishing is {vanishing}; no norm is below 0; set vanishing=0 for no warning")
        if not rising > 1:
            raise ValueError(f"rising is {rising}; a norm rises by a factor above 1; set rising=30")
        self._per_block = per_block
        self._limits = {"vanishing": vanishing, "rising": rising}
        self._trends: dict[int, NormTrend] = {}  # by optimizer
        self._steps = StepCounter()
        self._num_steps = 0  # since the last row
        self._num_clipped: Tensor | int = 0  # of `_num_steps`; 0-dim, on the device of the norm
        self._keeper: KeepsGradNorm | None = None
        self._hides_gradients = False
        self._has_lacked_spread = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._norms: dict[int, Tensor] = {}  # of the current step, by optimizer
        self._by_block: dict[str, float | None] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._keeper = trainer.strategy if isinstance(trainer.strategy, KeepsGradNorm) else None
        sharded = find_classes("strategies.DeepSpeedStrategy", "strategies.FSDPStrategy")
        self._hides_gradients = isinstance(trainer.strategy, sharded)
        if self._hides_gradients and self._keeper is None and trainer.is_global_zero:
            name = type(trainer.strategy).__name__
            log.warning(f"no grad/norm: {name} does not expose its sharded gradients; ModelParallelStrategy does")
        self._forget_step()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        is_logged = is_logged_step(trainer)
        if not (is_logged or _get_max_norm(trainer) is not None):
            return
        if self._hides_gradients:
            return
        # a strategy clips after this hook: what it holds now is the norm of the step before, proof that it keeps one
        is_kept = self._keeper is not None and self._keeper.grad_norm is not None
        if is_kept and not self._per_block:
            return
        scale = _get_scale_left(trainer, optimizer)
        joins = any(hasattr(parameter, "to_local") for parameter in pl_module.parameters())
        if self._per_block and is_logged:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            named = [(name, p.grad) for name, p in pl_module.named_parameters() if id(p) in own]
            by_block = sum_by_block(((name, grad) for name, grad in named if grad is not None), joins=joins)
            self._by_block |= {block: None if norm is None else norm / scale for block, norm in by_block.items()}
        if not is_kept and (norm := global_norm(optimizer, joins=joins)) is not None:
            self._norms[_get_index(trainer, optimizer)] = norm / scale

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer):
            return
        norms, by_block = self._norms, self._by_block
        self._forget_step()
        threshold: Tensor | float | None = _get_max_norm(trainer)
        if self._keeper is not None and self._keeper.grad_norm is not None:
            norms = {0: self._keeper.grad_norm.detach()}
            if self._keeper.clipping is not None and self._keeper.clip_threshold is not None:
                threshold = self._keeper.clip_threshold
        if threshold is not None:
            for norm in norms.values():
                self._num_steps += 1
                self._num_clipped = self._num_clipped + (norm > threshold).long()
        if norms and is_logged_step(trainer):
            row: dict[str, Tensor | float] = {}
            for index, norm in norms.items():
                if len(trainer.optimizers) <= 1:
                    row["grad/norm"] = norm
                else:
                    row[f"grad/norm/optimizer_{index}"] = norm
                self._check_trend(trainer, pl_module, index, float(norm))
            row |= self._take_clipped_fraction()
            if isinstance(threshold, Tensor):
                row["grad/clip_threshold"] = threshold.clamp(max=_NO_LIMIT)
            for block, block_norm in by_block.items():
                row[f"grad/norm/{block}"] = math.nan if block_norm is None else block_norm
            log_row(pl_module, row)

    def _check_trend(self, trainer: Trainer, pl_module: LightningModule, index: int, norm: float) -> None:
        """Warn if the norm vanishes or rises; only at logged steps, where it is read from the device anyway."""
        if norm == 0 and isinstance(pl_module, SupportsCompletions):
            # single steps have no norm in runs that learn: no sign of a trend
            warning = None if self._has_lacked_spread else f"the gradient is 0: {_NO_SPREAD}"
            self._has_lacked_spread = True
        else:
            warning = self._trends.setdefault(index, NormTrend(**self._limits)).observe(norm)
        if warning is not None and trainer.is_global_zero:
            of_which = "" if len(trainer.optimizers) <= 1 else f"optimizer {index}: "
            log.warning(f"Step {completed_steps(trainer)}: {of_which}{warning}")

    def _take_clipped_fraction(self) -> dict[str, Tensor | float]:
        """Return the clipped fraction since the last row, empty if no steps were counted, and reset the counts."""
        if self._num_steps == 0:
            return {}
        fraction = self._num_clipped / self._num_steps
        self._num_steps, self._num_clipped = 0, 0
        return {"grad/clipped_fraction": fraction}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "num_clipped": int(self._num_clipped),
            "trends": {index: trend.state_dict() for index, trend in self._trends.items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_steps = state_dict["num_steps"]
        self._num_clipped = state_dict["num_clipped"]
        for index, state in state_dict["trends"].items():
            self._trends[index] = NormTrend(**self._limits)
            self._trends[index].load_state_dict(state)


def _get_scale_left(trainer: Trainer, optimizer: Optimizer) -> float:
    """Return the loss scale still applied to the gradients; 1.0 once they are unscaled.

    Lightning unscales them before `on_before_optimizer_step`, unless the optimizer does so in its own kernel, as
    fused AdamW does under `16-mixed`.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())


def _get_index(trainer: Trainer, optimizer: Optimizer) -> int:
    """Return the index of an optimizer among the trainer's optimizers."""
    return next((index for index, other in enumerate(trainer.optimizers) if other is optimizer), 0)


def _get_max_norm(trainer: Trainer) -> float | None:
    max_norm = trainer.gradient_clip_val
    if not max_norm or str(trainer.gradient_clip_algorithm or "norm") != "norm":
        return None
    return float(max_norm)


def global_norm(optimizer: Optimizer, norm_type: float = 2.0, *, joins: bool = False) -> Tensor | None:
    """Return the 0-dim norm over all gradients of the optimizer's parameters; None if there are no gradients.

    Args:
        optimizer: Optimizer after a backward pass.
        norm_type: Order of the norm.
        joins: Whether a rank without gradients joins the sum of the others, as one whose pipeline stage is frozen must.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    present = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads if grad is not None]
    if not (present or joins):
        return None
    if norm_type == 2.0 and (not present or any(hasattr(grad, "to_local") for grad in present)):
        squares = sum_squares_by(
            ((str(number), grad) for number, grad in enumerate(present)), lambda _: "", joins=joins
        )
        return squares[""].sqrt().float() if squares else None
    norm = torch.nn.utils.get_total_norm(present, norm_type)  # [], dtype of the gradients
    # If gradients are DTensors, the norm is a partial result on each rank until it is gathered.
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()


# Detect a vanishing or rising gradient norm; costs a sort of 50 Python floats per call, no torch.

_WINDOW = 50  # norms per median


class NormTrend:
    """Warns once when the norm vanishes or keeps rising, and again only after it has recovered.

    Args:
        vanishing: Norm below which gradients have vanished.
        rising: Largest allowed factor between the median of the last 50 norms and the lowest such median so far.
    """

    def __init__(self, *, vanishing: float, rising: float) -> None:
        self._vanishing = vanishing
        self._rising = rising
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._lowest: float | None = None  # median so far
        self._state: str | None = None  # warned about: "vanishing" or "rising"

    def observe(self, norm: float) -> str | None:
        """Add a norm; return a warning if it has just started to vanish or rise, else None."""
        if not math.isfinite(norm):
            return None
        self._norms.append(norm)
        state, warning = None, ""
        if norm < self._vanishing:
            state = "vanishing"
            warning = f"the gradient norm has vanished, {norm:.3g}: nothing is learned"
        elif len(self._norms) == _WINDOW:
            median = statistics.median(self._norms)
            self._lowest = median if self._lowest is None else min(self._lowest, median)
            if median > self._rising * self._lowest:
                state = "rising"
                warning = (
                    f"the gradient norm has risen to {median:.3g} from {self._lowest:.3g}:"
                    " try a smaller learning rate or a longer warm-up"
                )
        is_new, self._state = state not in (None, self._state), state
        return warning if is_new else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"norms": list(self._norms), "lowest": self._lowest, "state": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._norms = deque(state["norms"], maxlen=_WINDOW)
        self._lowest, self._state = state["lowest"], state["state"]


# L2 norms of weights or gradients by block: one pass over the tensors, plus one all-reduce if they are sharded.

_BLOCK = re.compile(r"^(.*?\d+)\.")


def get_block(name: str) -> str:
    """Return the block of a parameter: `model.blocks.3.mlp.weight` -> `blocks.3`.

    For a parameter outside numbered blocks it is the module's name: `model.head.weight` -> `head`.
    """
    name = name.removeprefix("model.")
    numbered = _BLOCK.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


@torch.no_grad()
def norms_by_block(module: nn.Module) -> dict[str, float | None]:
    """Return the L2 norm of each block's weights; see `sum_by_block`."""
    return sum_by_block(module.named_parameters())


@torch.no_grad()
def sum_by_block(named: Iterable[tuple[str, Tensor]], *, joins: bool = False) -> dict[str, float | None]:
    """Return the L2 norm of each block's tensors; a collective if they are sharded.

    Args:
        named: Pairs of parameter name and tensor, DTensor or ZeRO-3 parameter placeholder.
        joins: Whether a rank with none of them joins the collective of the others.

    Returns:
        Norm by block; None if it is not finite.
    """
    squares = sum_squares_by(named, get_block, joins=joins)
    return {block: float(value.sqrt()) if bool(value.isfinite()) else None for block, value in squares.items()}


def sum_squares(named: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Return the sum of squares over all elements of one or more named tensors, 0-dim float64."""
    return sum_squares_by(named, lambda name: "")[""]


def sum_squares_by(
    named: Iterable[tuple[str, Tensor]], get_group: Callable[[str], str], *, joins: bool = False
) -> dict[str, Tensor]:
    """Return the sum of squares of each group, 0-dim float64; `get_group` maps a parameter name to its group."""
    whole: dict[str, Tensor] = {}
    addends: dict[str, Tensor] = {}  # this rank's contributions
    for name, tensor in named:
        square, is_addend = _sum_of_squares(tensor)
        sums, group = addends if is_addend else whole, get_group(name)
        sums[group] = sums[group] + square if group in sums else square
    totals = _sum_over_ranks(addends, joins=joins)
    for group, square in whole.items():
        totals[group] = totals[group] + square.to(totals[group].device) if group in totals else square
    return {group: totals[group] for group in dict.fromkeys([*whole, *totals])}


def _sum_of_squares(tensor: Any) -> tuple[Tensor, bool]:
    """Return the 0-dim float64 sum of squares, and whether it must be summed over ranks."""
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3: this rank's shard, padded with zeros
        in_memory = tensor.ds_tensor.status.name == "AVAILABLE"  # else offloaded to disk
        square: Tensor = tensor.ds_tensor.double().square().sum()
        return square if in_memory else torch.full_like(square, torch.nan), True
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.double().square().sum(), False
    # a DTensor with any placements: each element is counted by the first rank that holds it
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    is_first = not any(coordinate and placement.is_replicate() for coordinate, placement in places)
    return to_local().double().square().sum() * is_first, True


def _sum_over_ranks(addends: dict[str, Tensor], *, joins: bool) -> dict[str, Tensor]:
    """Sum over all ranks, whose names may differ, with one all-reduce; skip it if no rank has a name."""
    if not (addends or joins) or dist.get_world_size() == 1:
        return addends
    # pipeline-parallel ranks hold different blocks
    names = list(dict.fromkeys(name for of_rank in gather_objects(list(addends)) for name in of_rank))
    if not names:
        return {}
    zero = torch.zeros_like(next(iter(addends.values()), torch.zeros((), dtype=torch.float64)))
    stacked = torch.stack([addends.get(name, zero) for name in names])  # [blocks]
    stacked = stacked.cuda() if dist.get_backend() == "nccl" else stacked
    dist.all_reduce(stacked)
    return dict(zip(names, stacked, strict=True))
