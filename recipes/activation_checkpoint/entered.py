"""Enter context managers around calls of a module, outside its hooks and outside the compiled region."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

# (module, positional arguments, keyword arguments) -> context manager to enter
Entered = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]]
# one subclass per class: torch.compile and mode=plan treat modules of the same class as identical
_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def enter_calls(module: nn.Module, entered: Sequence[Entered]) -> None:
    """Enter context managers around every call of a module that is in training mode and records gradients.

    A wrapped `forward` or hook would run inside the compiled region, and Python looks up `__call__` only on the class.
    The module therefore gets a new class with the same name and parameters, as in FSDP2.
    """
    untyped: Any = module
    untyped._entered = tuple(entered)
    base = type(module)
    if base not in _SUBCLASSES:
        _SUBCLASSES[base] = _subclass(base)
    module.__class__ = _SUBCLASSES[base]


def _subclass(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose calls enter the module's context managers."""

    def call(self: Any, *inputs: Any, **options: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return base.__call__(self, *inputs, **options)
        with contextlib.ExitStack() as stack:
            for enter in self._entered:
                stack.enter_context(enter(self, inputs, options))
            return base.__call__(self, *inputs, **options)

    names = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), names)
