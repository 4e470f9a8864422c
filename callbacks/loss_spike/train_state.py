"""Access the train state that optimizer steps change: tensors by reference, scalars by copy."""

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn import Parameter

from ..lightning_internals import (
    get_averaged_model,
    get_callbacks,
    get_logged_step,
    get_monitored,
    set_logged_step,
    set_monitored,
)
from ..lightning_packages import find_classes

_REACHABLE = tuple(f"strategies.{name}" for name in ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"))
_RATES = ("lr", "initial_lr")
_WEIGHT_AVERAGING = "callbacks.WeightAveraging"  # Lightning 2.5 has none


def is_reachable(trainer: Trainer) -> bool:
    """Return whether `live_tensors` can access the train state, in plain torch optimizers or through the strategy."""
    strategy = trainer.strategy
    is_torch = isinstance(strategy, find_classes(*_REACHABLE))
    is_torch &= not isinstance(strategy, find_classes("strategies.DeepSpeedStrategy"))
    return hasattr(strategy, "live_tensors") or is_torch


def live_tensors(trainer: Trainer, *, writes_back: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of weights, persistent buffers and optimizer state, without copying.

    For a sharded tensor, yield this rank's shard. A strategy whose engine does not expose its state provides
    `live_tensors(writes_back=)` itself.

    Args:
        trainer: The trainer.
        writes_back: Whether the caller overwrites the tensors.
    """
    own = getattr(trainer.strategy, "live_tensors", None)
    yield from _torch_tensors(trainer) if own is None else own(writes_back=writes_back)
    for number, average in enumerate(_find_averages(trainer)):
        for name, tensor in average.state_dict(keep_vars=True).items():
            yield f"average/{number}/{name}", _local(tensor)


def _torch_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    optimized = {id(parameter) for optimizer in trainer.optimizers for parameter in _parameters(optimizer)}
    seen: set[int] = set()
    for name, tensor in trainer.lightning_module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Parameter) and not tensor.requires_grad and id(tensor) not in optimized:
            continue  # frozen, as in adapter training: no step changes it
        if isinstance(tensor, Tensor) and id(tensor) not in seen:  # tied weights have two names
            seen.add(id(tensor))
            kind = "module" if isinstance(tensor, Parameter) else "buffer"
            yield f"{kind}/{name}", _local(tensor)
    for number, optimizer in enumerate(trainer.optimizers):
        for index, parameter in enumerate(_parameters(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer/{number}/{index}/{key}", _local(value)


def _find_averages(trainer: Trainer) -> list[Any]:
    """Return the averaged models of Lightning's `WeightAveraging` callbacks."""
    kinds = find_classes(_WEIGHT_AVERAGING)
    callbacks = get_callbacks(trainer)
    models = (get_averaged_model(callback) for callback in callbacks if isinstance(callback, kinds))
    return [model for model in models if model is not None]


def forget_tensors(trainer: Trainer, names: list[str]) -> None:
    """Delete optimizer state created after a snapshot; the optimizer creates it again when needed.

    Args:
        trainer: The trainer whose optimizers to change.
        names: Names as yielded by `live_tensors`.
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
    """Return a copy of the rest of the train state: LR schedulers, learning rates, loss scale, step counts, RNG states.

    Includes optimizer state that is not a tensor, such as Adafactor's step count or the history of LBFGS. A strategy
    with further state provides `live_scalars()` and `restore_scalars(scalars)`, a module the same with the prefix
    `recipes_`.
    """
    loop = trainer.fit_loop.epoch_loop
    own = getattr(trainer.strategy, "live_scalars", None)
    of_module = getattr(trainer.lightning_module, "recipes_live_scalars", None)
    return {
        "step": trainer.global_step,
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "groups": [_hyperparameters(optimizer) for optimizer in trainer.optimizers],
        "optimizers": [] if own is not None else [_plain_state(optimizer) for optimizer in trainer.optimizers],
        "precision": copy.deepcopy(trainer.precision_plugin.state_dict()),
        "strategy": None if own is None else own(),
        "optim_progress": copy.deepcopy(loop.automatic_optimization.optim_progress.state_dict()),
        "scheduler_progress": copy.deepcopy(loop.scheduler_progress.state_dict()),
        "logged_step": get_logged_step(trainer),
        "monitored": get_monitored(trainer),
        "callbacks": [copy.deepcopy(callback.state_dict()) for callback in _find_stateful(trainer)],
        "module": None if of_module is None else of_module(),
        "random": rng_state(),
    }


def restore_scalars(trainer: Trainer, scalars: dict[str, Any], *, with_random: bool) -> None:
    """Restore the scalars that `live_scalars` returned; they can be restored any number of times.

    Args:
        trainer: The trainer.
        scalars: Return value of `live_scalars`.
        with_random: Whether to restore the RNG states; only if the data is rewound too. Otherwise the data continues,
            and old RNG states would shuffle the next epoch like the current one.
    """
    scalars = copy.deepcopy(scalars)  # load_state_dict may keep and modify what it is given
    loop = trainer.fit_loop.epoch_loop
    configs = trainer.lr_scheduler_configs
    for config, state in zip(configs, scalars["schedulers"], strict=True):
        if config.interval == "step":  # a rollback does not rewind epochs or their schedulers
            config.scheduler.load_state_dict(state)
    by_epoch = any(config.interval == "epoch" for config in configs)
    for optimizer, groups in zip(trainer.optimizers, scalars["groups"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            values = {key: value for key, value in saved.items() if not by_epoch or key not in _RATES}
            group.update(values)
    for optimizer, states in zip(trainer.optimizers, scalars["optimizers"], strict=False):
        _restore_plain_state(optimizer, states)
    if scalars["precision"]:
        trainer.precision_plugin.load_state_dict(scalars["precision"])
    strategy: Any = trainer.strategy
    module: Any = trainer.lightning_module
    if scalars["strategy"] is not None:
        strategy.restore_scalars(scalars["strategy"])
    if scalars["module"] is not None:
        module.recipes_restore_scalars(scalars["module"])
    for callback, state in zip(_find_stateful(trainer), scalars["callbacks"], strict=True):
        callback.load_state_dict(state)
    loop.automatic_optimization.optim_progress.load_state_dict(scalars["optim_progress"])
    loop.scheduler_progress.load_state_dict(scalars["scheduler_progress"])
    set_logged_step(trainer, scalars["logged_step"])
    set_monitored(trainer, scalars["monitored"])
    if with_random:
        _restore_rng_state(scalars["random"])


def _find_stateful(trainer: Trainer) -> list[Any]:
    """Return Lightning's callbacks whose state must follow a rollback: weight averaging and early stopping."""
    kinds = find_classes("callbacks.EarlyStopping", _WEIGHT_AVERAGING)
    return [callback for callback in get_callbacks(trainer) if isinstance(callback, kinds)]


def _plain_state(optimizer: Any) -> list[dict[str, Any]]:
    """Return a copy of the non-tensor optimizer state, by parameter."""
    states = (optimizer.state.get(parameter, {}) for parameter in _parameters(optimizer))
    return [
        {key: copy.deepcopy(value) for key, value in state.items() if not isinstance(value, Tensor)} for state in states
    ]


def _restore_plain_state(optimizer: Any, states: list[dict[str, Any]]) -> None:
    for parameter, saved in zip(_parameters(optimizer), states, strict=True):
        if not saved and parameter not in optimizer.state:
            continue
        state = optimizer.state[parameter]
        for key in [key for key, value in state.items() if not isinstance(value, Tensor) and key not in saved]:
            del state[key]
        state.update(saved)
        if not state:
            del optimizer.state[parameter]


def _hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; return any other tensor detached."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor.detach() if to_local is None else to_local()


def rng_state() -> dict[str, Any]:
    """Return this process's RNG states of torch, CUDA, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _restore_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
