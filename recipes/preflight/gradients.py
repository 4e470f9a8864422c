"""Check that every parameter is trained, gets a gradient, and belongs to the optimizer."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from recipes.adapter import is_adapter
from recipes.engine import get_engine
from recipes.optimizer.rules import get_rules
from recipes.parallel.placement import local
from recipes.preflight.result import Result, judge

_SHOWN = 4


class GradientProbe(Callback):
    """Records which parameters get a nonzero gradient in the first steps, under any strategy.

    Attributes:
        names: Names of all parameters.
        frozen: Names of parameters that do not require a gradient.
        reached: Names of parameters with a nonzero gradient on any rank; available when training ends.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.frozen: list[str] = []
        self.reached: set[str] = set()
        self._seen: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    @override
    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        parameters = dict(pl_module.named_parameters())
        if any(map(is_adapter, parameters)):  # then everything else is frozen on purpose
            parameters = {name: parameter for name, parameter in parameters.items() if is_adapter(name)}
        rules = get_rules(pl_module.model)
        if rules is not None:  # so is what they freeze
            parameters = {
                name: parameter
                for name, parameter in parameters.items()
                if name.removeprefix("model.") not in rules.frozen_names
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
        flags = torch.tensor([bool(self._seen.get(name, False)) for name in self.names], device=device).int()
        if dist.is_initialized():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        self.reached = {name for name, flag in zip(self.names, flags.tolist(), strict=True) if flag}


def check_frozen(probe: GradientProbe) -> Result:
    """Check that every parameter is trained."""
    found = f"{len(probe.names) - len(probe.frozen)} of {len(probe.names)} tensors are trained"
    if probe.frozen:
        found += f", not {_shorten(probe.frozen)}"
    remedy = "something has set requires_grad to False"
    return judge("no parameter is frozen", found, passes=not probe.frozen, remedy=remedy)


def check_gradients(probe: GradientProbe) -> Result:
    """Check that every trained parameter has a nonzero gradient."""
    trained = [each for each in probe.names if each not in probe.frozen]
    missing = [each for each in trained if each not in probe.reached]
    found = f"none, or zero throughout: {_shorten(missing)}" if missing else f"all of {len(trained)} tensors"
    remedy = "the forward pass does not use them, or detaches their output"
    return judge("every parameter has a gradient", found, passes=not missing, remedy=remedy)


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
