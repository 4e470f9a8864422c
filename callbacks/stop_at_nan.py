"""Stop a run at its first NaN and report the operation and source line that produced it.

For debugging only: the result of every operation is checked, each with a device synchronization.
"""

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import override

from .lightning_packages import Callback
from .logged_step import completed_steps

Stack = list[traceback.FrameSummary]
_TORCH = str(Path(torch.__file__).parent)
_STEP = "training_step"
# anomaly detection emits a warning with the forward traceback of the operation whose backward produced NaN
_ANOMALY = re.compile(r"Error detected in (\w+)\..*Traceback of forward call", re.DOTALL)
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)\n(?:    (.+)\n)?')


class StopAtNan(Callback):
    """Raises when a loss is NaN and names the operation that produced the first NaN, its inputs and its source line.

    Useful for finding out where a NaN loss originates. The loss is checked before every backward pass, also if there
    are several per batch.

    Set `Trainer(detect_anomaly=True)` as well, which finds a NaN that originates in the backward pass; this callback
    adds the line of its forward operation to the exception, on whichever rank it occurs. Disable any callback that
    skips steps with a NaN loss. Neither check sees inside compiled code.

    Args:
        check_finite: Also raise when a loss is inf. Operations that produce inf on purpose, such as masking, may then
            be reported instead.

    Raises:
        FloatingPointError: At the first such loss.

    Example:
        >>> trainer = Trainer(callbacks=[StopAtNan()], detect_anomaly=True, accelerator="cpu", logger=False)
        >>> type(trainer.callbacks[0]).__name__
        'StopAtNan'
    """

    def __init__(self, *, check_finite: bool = False) -> None:
        super().__init__()
        self._what = "NaN or inf" if check_finite else "NaN"
        self._is_bad: Callable[[Tensor], bool] = _has_non_finite if check_finite else _has_nan
        self._search: _FirstBad | None = None  # only during a batch
        self._anomaly: str | None = None
        self._show_warning: Any = None  # the `warnings.showwarning` that ours replaces

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._catch_anomaly

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._search = _FirstBad(self._is_bad, self._what)
        self._search.__enter__()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        search = self._search
        if search is None:
            return
        search.is_on = False  # anomaly detection checks the backward pass
        if not self._is_bad(loss):
            return  # a NaN that does not reach the loss may be intentional
        where = _describe_step(trainer)
        if search.description is None:
            raise FloatingPointError(
                f"{where}: the loss is {self._what}, and no operation on the weights produced it: look at the batch"
            )
        error = FloatingPointError(f"{where}: the loss is {self._what}; {search.description}")
        error.add_note(search.path)
        raise error

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._search is not None:
            self._search.restart()  # for another forward pass in this batch

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_search()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_warnings()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_search()
        self._restore_warnings()
        if self._anomaly is not None:
            exception.add_note(f"{_describe_step(trainer)}: {self._anomaly}")

    def _stop_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.__exit__(None, None, None)

    def _restore_warnings(self) -> None:
        if self._show_warning is not None:
            warnings.showwarning, self._show_warning = self._show_warning, None

    def _catch_anomaly(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        """Store torch's warning with the forward traceback: a rank without a console would not show it."""
        if (anomaly := _ANOMALY.match(str(message))) is None:
            self._show_warning(message, *args, **kwargs)
            return
        frames = [
            traceback.FrameSummary(file, int(line), function, line=code or "")
            for file, line, function, code in _FRAME.findall(str(message))
        ]
        place, path = _locate(frames)
        self._anomaly = f"the backward pass produced the NaN, in {anomaly[1]}; its forward operation is {place}\n{path}"


def _describe_step(trainer: Trainer) -> str:
    """Return the current step, counted from 1, and the rank as text."""
    is_automatic = trainer.lightning_module.automatic_optimization  # else the current batch is already counted
    return f"step {completed_steps(trainer) + is_automatic}, rank {trainer.global_rank}"


class _FirstBad(TorchFunctionMode):
    """Finds the first operation whose result depends on the weights and contains NaN (or inf).

    Args:
        is_bad: Returns whether a tensor contains such a value.
        what: Name of the value, for messages.

    Attributes:
        is_on: Whether operations are checked.
        description: The operation, its inputs and its source line; None until one is found.
        path: The stack from the training step to that line.
    """

    def __init__(self, is_bad: Callable[[Tensor], bool], what: str) -> None:
        super().__init__()
        self._is_bad = is_bad
        self._what = what
        self.restart()

    def restart(self) -> None:
        """Discard the result and search again."""
        self.is_on = True
        self.description: str | None = None
        self.path = ""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # a tensor without a gradient may be uninitialized memory, such as the buffers of some engines
        if self.is_on and self.description is None and torch.is_grad_enabled() and self._contains_bad(result):
            stack = traceback.extract_stack()
            if any(frame.name == _STEP for frame in stack):  # ignore operations on the loss outside the step
                self._describe(func, [*_tensors((args, kwargs or {}))], stack)
        return result

    def _contains_bad(self, result: Any) -> bool:
        return any(tensor.grad_fn is not None and self._is_bad(tensor) for tensor in _tensors(result))

    def _describe(self, func: Any, inputs: list[Tensor], stack: Stack) -> None:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        place, self.path = _locate(stack)
        operation = f"{name}({', '.join(map(_describe_tensor, inputs))})"
        self.description = f"the first {self._what} of the forward pass is from {operation}, {place}"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's result or arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.isnan().any())


def _has_non_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _describe_tensor(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return f"{dtype} {list(tensor.shape)}"
    num_nan = int(tensor.isnan().sum())
    finite = tensor.detach()[tensor.isfinite()]  # [number of finite values]
    values = f"{float(finite.min()):.3g} to {float(finite.max()):.3g}" if len(finite) else "none"
    num_not_finite = tensor.numel() - len(finite)
    if num_nan:
        values += f", {num_nan} NaN"
    if num_not_finite > num_nan:
        values += f", {num_not_finite - num_nan} inf"
    return f"{dtype} {list(tensor.shape)}: {values}"


def _locate(stack: Stack) -> tuple[str, str]:
    """Return the innermost line outside torch and this file, and the stack from the training step to that line."""
    starts = [number for number, frame in enumerate(stack) if frame.name == _STEP]
    path = stack[starts[-1] :] if starts else stack
    path = [frame for frame in path if not frame.filename.startswith((_TORCH, __file__))] or path
    last = path[-1]
    place = f"{last.filename}, line {last.lineno}, in {last.name}: {last.line}"
    return place, "".join(traceback.format_list(path)).rstrip()
