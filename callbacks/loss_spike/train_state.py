"""What an optimizer step changes: the tensors themselves, and the numbers beside them. References, no copies."""

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor
from torch.nn import Parameter

_REACHABLE = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
_RATES = ("lr", "initial_lr")


def is_reachable(trainer: Trainer) -> bool:
    """Whether `live_tensors` finds the run's state: torch's own tensors, or a strategy that answers for its engine."""
    strategy = trainer.strategy
    is_torch = isinstance(strategy, _REACHABLE) and not isinstance(strategy, DeepSpeedStrategy)
    return hasattr(strategy, "live_tensors") or is_torch


def live_tensors(trainer: Trainer, *, writes_back: bool) -> Iterator[tuple[str, Tensor]]:
    """Weights, persistent buffers, what the optimizers keep for each parameter, and this rank's random states.

    Of a sharded tensor this rank's shard. A strategy whose engine keeps its state out of sight answers
    `live_tensors(writes_back=)` itself.

    Args:
        writes_back: Whether the caller overwrites what it is given.
    """
    own = getattr(trainer.strategy, "live_tensors", None)
    if own is not None:
        yield from own(writes_back=writes_back)
        return
    seen: set[int] = set()
    for name, tensor in trainer.lightning_module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:  # tied weights have two names
            seen.add(id(tensor))
            kind = "module" if isinstance(tensor, Parameter) else "buffer"
            yield f"{kind}/{name}", _local(tensor)
    for number, optimizer in enumerate(trainer.optimizers):
        for index, parameter in enumerate(_parameters(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer/{number}/{index}/{key}", _local(value)


def forget_tensors(trainer: Trainer, names: list[str]) -> None:
    """Take away what an optimizer has come to keep since: it begins with it anew, as it did then.

    Args:
        trainer: Whose optimizers.
        names: From `live_tensors`.
    """
    own = getattr(trainer.strategy, "forget_tensors", None)
    if own is not None:
        own(names)
        return
    for name in names:
        kind, _, place = name.partition("/")
        if kind == "optimizer":
            number, index, key = place.split("/", 2)
            optimizer = trainer.optimizers[int(number)]
            parameter = _parameters(optimizer)[int(index)]
            optimizer.state[parameter].pop(key)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]


def live_scalars(trainer: Trainer) -> dict[str, Any]:
    """A copy of everything else that goes back: schedules, learning rates, loss scale, step counters, random states.

    A strategy or a module that has more answers `live_scalars()`, and takes it in `restore_scalars(numbers)`.
    """
    loop = trainer.fit_loop.epoch_loop
    own = getattr(trainer.strategy, "live_scalars", None)
    of_module = getattr(trainer.lightning_module, "live_scalars", None)
    return {
        "step": trainer.global_step,
        "schedulers": [
            copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs
        ],
        "groups": [_hyperparameters(optimizer) for optimizer in trainer.optimizers],
        "precision": copy.deepcopy(trainer.precision_plugin.state_dict()),
        "strategy": None if own is None else own(),
        "optim_progress": copy.deepcopy(loop.automatic_optimization.optim_progress.state_dict()),
        "scheduler_progress": copy.deepcopy(loop.scheduler_progress.state_dict()),
        "module": None if of_module is None else of_module(),
        "random": rng_state(),
    }


def restore_scalars(trainer: Trainer, numbers: dict[str, Any]) -> None:
    """As they were when `live_scalars` was called, however often."""
    numbers = copy.deepcopy(numbers)  # what is handed out may be changed by the one who takes it
    loop = trainer.fit_loop.epoch_loop
    configs = trainer.lr_scheduler_configs
    for config, state in zip(configs, numbers["schedulers"], strict=True):
        if config.interval == "step":  # epochs go on, and with them their schedules
            config.scheduler.load_state_dict(state)
    by_epoch = any(config.interval == "epoch" for config in configs)
    for optimizer, groups in zip(trainer.optimizers, numbers["groups"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            kept = {key: value for key, value in saved.items() if not by_epoch or key not in _RATES}
            group.update(kept)
    if numbers["precision"]:
        trainer.precision_plugin.load_state_dict(numbers["precision"])
    if numbers["strategy"] is not None:
        trainer.strategy.restore_scalars(numbers["strategy"])  # type: ignore[attr-defined]
    if numbers["module"] is not None:
        trainer.lightning_module.restore_scalars(numbers["module"])  # type: ignore[operator]
    loop.automatic_optimization.optim_progress.load_state_dict(numbers["optim_progress"])
    loop.scheduler_progress.load_state_dict(numbers["scheduler_progress"])
    _put_random_state_back(numbers["random"])


def _hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, which shares its memory; any other tensor as it is."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor.detach() if to_local is None else to_local()


def rng_state() -> dict[str, Any]:
    """Of this process: torch's, the GPU's, Python's and numpy's."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _put_random_state_back(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
