"""Log how far steps move the weights, and the norms of the optimizer's moments: one copy of the weights per log."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .grad_norm.callback import get_block, sum_squares_by
from .lightning_packages import Callback, find_classes
from .logged_step import StepCounter, is_logged_step, log_row

_TOTAL = ""  # group of all parameters


class OptimizerMonitor(Callback):
    """Logs `optimizer/update_ratio` and `optimizer/norm/<moment>` at logged steps.

    Useful for choosing a learning rate: the update ratio is the L2 norm of the step's change of the weights over the
    norm of the weights, all in all, whatever the optimizer does with gradient, momentum and weight decay. A skipped
    step has the ratio 0. The moments are all tensors of the optimizer state that have the shape of their weights, such
    as `exp_avg` and `exp_avg_sq` of Adam: a spike in the loss that follows a fall of `exp_avg_sq` is one of the
    optimizer.

    At a logged step, a copy of the trained weights is held from before the optimizer step to the end of the batch.
    Under FSDP1 and DeepSpeed, which do not expose their sharded weights, nothing is logged.

    Args:
        per_block: Also log `optimizer/update_ratio/<block>`.

    Example:
        >>> trainer = Trainer(callbacks=[OptimizerMonitor()], accelerator="cpu", logger=False)
        >>> type(trainer.callbacks[0]).__name__
        'OptimizerMonitor'
    """

    def __init__(self, *, per_block: bool = False) -> None:
        super().__init__()
        self._per_block = per_block
        self._steps = StepCounter()
        self._before: dict[int, Tensor] = {}  # weights before the step, by id of the parameter
        self._stepped: list[Optimizer] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._before, self._stepped = {}, []

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        hides_weights = isinstance(
            trainer.strategy, find_classes("strategies.DeepSpeedStrategy", "strategies.FSDPStrategy")
        )
        if hides_weights or not is_logged_step(trainer):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # a line search calls this again, with other weights
        new = {id(p): p.detach().clone() for p in parameters if id(p) not in self._before}  # of each parameter's shape
        self._before |= new
        self._stepped += [optimizer] if optimizer not in self._stepped else []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._before = self._before, {}
        stepped, self._stepped = self._stepped, []
        if not self._steps.stepped(trainer) or not stepped or not is_logged_step(trainer):
            return
        # a rank whose pipeline stage is frozen steps nothing, and joins the sums of the others
        joins = any(hasattr(parameter, "to_local") for parameter in pl_module.parameters())
        if not (before or joins):
            return
        named = [(name, p.detach()) for name, p in pl_module.named_parameters() if id(p) in before]
        changes = [(name, p.detach() - before[id(p)]) for name, p in pl_module.named_parameters() if id(p) in before]
        total = _ratio(changes, named, lambda name: _TOTAL, joins=joins)[_TOTAL]
        row: dict[str, float | Tensor] = {"optimizer/update_ratio": total}
        if self._per_block:
            ratios = _ratio(changes, named, get_block, joins=joins)
            row |= {f"optimizer/update_ratio/{block}": ratio for block, ratio in ratios.items()}
        moments = [
            (key, value)
            for optimizer in stepped
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
        ]
        norms = sum_squares_by(moments, lambda key: key, joins=joins)
        row |= {f"optimizer/norm/{key}": square.sqrt() for key, square in norms.items()}
        log_row(pl_module, row)


@torch.no_grad()
def _ratio(changes: Any, weights: Any, get_group: Any, *, joins: bool) -> dict[str, Tensor]:
    """Return the norm of the changes over that of the weights, 0-dim float64 by group."""
    squares, of_changes = (sum_squares_by(named, get_group, joins=joins) for named in (weights, changes))
    return {group: (of_changes[group] / squares[group]).sqrt() for group in of_changes}
