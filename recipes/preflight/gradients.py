"""Check that every parameter is trained, gets a gradient, and belongs to the optimizer.

No gradient and a gradient of zero are two findings. A parameter that the forward pass does not use has none. One that
it uses may have a gradient of exactly zero by construction: the bias of the last norm shifts both rewards of a pair
alike, and a loss that compares them does not depend on it.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from recipes.adapter import is_adapter, list_trained_beside
from recipes.engine import get_engine
from recipes.model.score import list_unused
from recipes.optimizer.rules import get_rules
from recipes.parallel.placement import local
from recipes.preflight.result import Result, judge

_SHOWN = 4


class GradientProbe(Callback):
    """Records which parameters get a gradient in the first steps, and of which it is not zero, under any strategy.

    Attributes:
        names: Names of all parameters.
        frozen: Names of parameters that do not require a gradient.
        computed: Names of parameters with a gradient on any rank; available when training ends.
        reached: Names of those with one that is not zero throughout; available when training ends.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.frozen: list[str] = []
        self.computed: set[str] = set()
        self.reached: set[str] = set()
        self._seen: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    @override
    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        parameters = dict(pl_module.named_parameters())
        if any(map(is_adapter, parameters)):  # then everything else is frozen on purpose, but for what it names
            beside = {f"model.{name}" for name in list_trained_beside(pl_module.model)}
            parameters = {
                name: parameter for name, parameter in parameters.items() if is_adapter(name) or name in beside
            }
        rules = get_rules(pl_module.model)
        on_purpose = {*list_unused(pl_module.model), *(() if rules is None else rules.frozen_names)}
        parameters = {
            name: parameter for name, parameter in parameters.items() if name.removeprefix("model.") not in on_purpose
        }
        self.names = list(parameters)
        self.frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        # DeepSpeed consumes gradients as they arrive; FSDP2 computes them for another tensor, see below
        self._handles = [
            parameter.register_hook(lambda grad, name=name: self._note(name, grad))
            for name, parameter in parameters.items()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]

    @override
    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                self._note(name, parameter.grad)

    def _note(self, name: str, grad: Tensor) -> None:
        shard = local(grad)
        if shard.numel():
            flag = (shard != 0).any()  # NaN is not zero
            self._seen[name] = self._seen[name] | flag if name in self._seen else flag

    @override
    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        for handle in self._handles:
            handle.remove()
        device = "cuda" if get_engine(trainer).root_device.type == "cuda" else "cpu"
        flags = [[name in self._seen, bool(self._seen.get(name, False))] for name in self.names]
        of_all = torch.tensor(flags, device=device).int()  # [names, 2]
        if dist.is_initialized():
            dist.all_reduce(of_all, dist.ReduceOp.MAX)
        found = list(zip(self.names, of_all.tolist(), strict=True))
        self.computed = {name for name, (is_computed, _) in found if is_computed}
        self.reached = {name for name, (_, is_nonzero) in found if is_nonzero}


def check_frozen(probe: GradientProbe) -> Result:
    """Check that every parameter is trained."""
    found = f"{len(probe.names) - len(probe.frozen)} of {len(probe.names)} tensors are trained"
    if probe.frozen:
        found += f", not {_shorten(probe.frozen)}"
    remedy = "something has set requires_grad to False"
    return judge("no parameter is frozen", found, passes=not probe.frozen, remedy=remedy)


def check_gradients(probe: GradientProbe, *, sees_differences_only: bool = False) -> Result:
    """Check that every trained parameter has a gradient, and name those whose gradient is zero throughout.

    Args:
        probe: Probe after training.
        sees_differences_only: Whether the loss compares scores, so that a bias that shifts all alike has none.
    """
    name = "every parameter has a gradient"
    trained = [each for each in probe.names if each not in probe.frozen]
    missing = [each for each in trained if each not in probe.computed]
    if missing:
        remedy = "the forward pass does not use them, or detaches their output"
        return Result(check=name, status="fail", found=f"none: {_shorten(missing)}", remedy=remedy)
    zero = [each for each in trained if each not in probe.reached]
    shifts = [each for each in zero if sees_differences_only and each.endswith("bias")]
    without = [each for each in zero if each not in shifts]
    found = f"all of {len(trained)} tensors"
    if without:
        found += f", exactly zero in every step: {_shorten(without)}"
    elif shifts:
        found = f"all but {_shorten(shifts)}, which shifts all scores alike, and the loss sees their differences"
    remedy = (
        "something multiplies them by zero, or the loss does not depend on them, as one that compares two answers does"
        " not on what shifts both alike: these parameters will not learn"
    )
    return judge(name, found, passes=not without, fails=len(zero) == len(trained), remedy=remedy)


def check_optimizer(probe: GradientProbe, optimized: Sequence[str]) -> Result:
    """Check that the optimizer steps every trained parameter once.

    Args:
        probe: Probe after training.
        optimized: Names of the parameters in the optimizer's groups.
    """
    name = "the optimizer has all parameters"
    trained = [each for each in probe.names if each not in probe.frozen]
    missing = [each for each in trained if each not in set(optimized)]
    twice = sorted({each for each in optimized if list(optimized).count(each) > 1})
    if not missing and not twice:
        return Result(check=name, status="pass", found=f"all of {len(trained)} tensors, each once")
    found = f"not in it: {_shorten(missing)}" if missing else f"in it twice: {_shorten(twice)}"
    return Result(check=name, status="fail", found=found, remedy="the function that makes its groups omits them")


def _shorten(names: Sequence[str]) -> str:
    more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
    return ", ".join(names[:_SHOWN]) + more
