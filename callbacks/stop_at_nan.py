"""Ends a run at its first NaN and names the line of the forward pass that made it: a look at every operation's result.

For finding one, not for training: the look waits for the device, operation by operation.
"""

import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

Stack = list[traceback.FrameSummary]
_TORCH = str(Path(torch.__file__).parent)
_STEP = "training_step"
# how torch's anomaly detection tells where in the forward pass an operation was that failed in the backward pass
_ANOMALY = re.compile(r"Error detected in (\w+)\..*Traceback of forward call", re.DOTALL)
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)\n(?:    (.+)\n)?')


class StopAtNan(Callback):
    """Raises where the loss is NaN, with the operation that made the first one, its inputs and its line.

    A NaN that is born in the backward pass is found by `Trainer(detect_anomaly=True)`, which this callback wants
    beside it; its forward line is added to the exception, on whichever rank. Whatever skips a step that is no number
    must be off. Compiled code is looked into by neither.

    Raises:
        FloatingPointError: At the first loss that is NaN.
    """

    def __init__(self) -> None:
        self._look: _FirstNan | None = None  # during a forward pass
        self._anomaly: str | None = None
        self._show_warning: Any = None  # what our own stands before

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._hear

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._look = _FirstNan()
        self._look.__enter__()  # type: ignore[no-untyped-call]

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        first = self._stop_looking()
        if first is None or not bool(loss.isnan().any()):
            return  # a NaN that does not reach the loss is the model's own affair
        where = f"step {trainer.global_step + 1}, rank {trainer.global_rank}"
        if first.found is None:
            raise FloatingPointError(
                f"{where}: the loss is NaN, and no operation on the weights made it: look at the batch"
            )
        error = FloatingPointError(f"{where}: the loss is NaN; {first.found}")
        error.add_note(first.way)
        raise error

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_looking()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_listening()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop_looking()
        self._stop_listening()
        if self._anomaly is not None:
            where = f"step {trainer.global_step + 1}, rank {trainer.global_rank}"
            exception.add_note(f"{where}: {self._anomaly}")

    def _stop_looking(self) -> "_FirstNan | None":
        look, self._look = self._look, None
        if look is not None:
            look.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return look

    def _stop_listening(self) -> None:
        if self._show_warning is not None:
            warnings.showwarning, self._show_warning = self._show_warning, None

    def _hear(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        """torch tells the forward line in a warning, which a rank without a console says to nobody."""
        if (anomaly := _ANOMALY.match(str(message))) is None:
            self._show_warning(message, *args, **kwargs)
            return
        frames = [
            traceback.FrameSummary(file, int(line), function, line=code or "")
            for file, line, function, code in _FRAME.findall(str(message))
        ]
        place, way = _told(frames)
        self._anomaly = f"the backward pass made the NaN, in {anomaly[1]}; its forward operation is {place}\n{way}"


class _FirstNan(TorchFunctionMode):
    """Notes the first operation whose result depends on the weights and holds a NaN.

    Attributes:
        found: What it was, in a line.
        way: From the training step to that line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None
        self.way = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # what no gradient goes through may be memory that nobody has written to yet: engines have such
        if self.found is None and torch.is_grad_enabled() and any(map(_has_nan, _tensors(result))):
            stack = traceback.extract_stack()
            if any(frame.name == _STEP for frame in stack):  # not what is done with its loss
                self._note(func, [*_tensors((args, kwargs or {}))], stack)
        return result

    def _note(self, func: Any, given: list[Tensor], stack: Stack) -> None:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        place, self.way = _told(stack)
        operation = f"{name}({', '.join(map(_described, given))})"
        self.found = f"the first NaN of the forward pass is from {operation}, {place}"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in an operation's result or arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.grad_fn is not None and bool(tensor.isnan().any())


def _described(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return f"{kind} {list(tensor.shape)}"
    num_nan = int(tensor.isnan().sum())
    numbers = tensor.detach()[tensor.isfinite()]
    span = f"{float(numbers.min()):.3g} to {float(numbers.max()):.3g}" if len(numbers) else "none"
    not_finite = tensor.numel() - len(numbers)
    if num_nan:
        span += f", {num_nan} NaN"
    if not_finite > num_nan:
        span += f", {not_finite - num_nan} inf"
    return f"{kind} {list(tensor.shape)}: {span}"


def _told(stack: Stack) -> tuple[str, str]:
    """The innermost line that is neither torch's nor ours, and the way to it from the training step."""
    begins = [number for number, frame in enumerate(stack) if frame.name == _STEP]
    way = stack[begins[-1] :] if begins else stack
    way = [frame for frame in way if not frame.filename.startswith((_TORCH, __file__))] or way
    last = way[-1]
    place = f"{last.filename}, line {last.lineno}, in {last.name}: {last.line}"
    return place, "".join(traceback.format_list(way)).rstrip()
