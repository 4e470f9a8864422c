"""Write a model as one ONNX graph and compare what onnxruntime computes of it with the model.

The first axis, samples, may have any length, and so may that of tokens, up to the longest input of the model.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError

ONNX_FILE = "model.onnx"
INPUT, OUTPUT = "inputs", "outputs"
TOLERANCE = 1e-5  # of float32, relative to the largest output: other kernels for the same sums
_NUM_TRACED = 2  # samples: an axis of one would be taken for a constant
_MOST_BYTES = 1 << 30  # of weights in the graph itself: the format ends at 2 GiB
_OTHER_FORMAT = "mode.format=auto"


class _WithoutPadding(nn.Module):
    """A model whose outputs end with the last one that means something."""

    def __init__(self, model: nn.Module, num_outputs: int | None) -> None:
        super().__init__()
        self.model = model
        self.num_outputs = num_outputs

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs if self.num_outputs is None else outputs[..., : self.num_outputs]


def write_onnx(model: nn.Module, example: Tensor, folder: Path) -> float:
    """Write `model.onnx` into a folder and compare it with the model, on more and longer samples than were traced.

    Args:
        model: Eager model in float32, in eval mode, on the CPU.
        example: Inputs of three samples, [3, …].
        folder: Folder to fill; weights beyond 1 GiB are in a file beside the graph.

    Returns:
        The largest difference of an output, relative to the largest output or 1.

    Raises:
        ConfigError: The model cannot be written as a graph, or the graph computes something else.
    """
    whole = _WithoutPadding(model, getattr(model, "vocab_size", None)).eval()
    free: dict[int, Any] = {0: torch.export.Dim("samples")}
    checked = example
    if getattr(model, "input_kind", None) == "tokens":
        longest: int = model.max_seq_len  # type: ignore[assignment]
        if longest > 1:
            free[1] = torch.export.Dim("tokens", max=longest)
            checked = example.repeat(1, 2)[:, : min(longest, 2 * example.shape[1] - 1)]
    with torch.no_grad(), _quietly(), _with_one_flag_of_cudnn():
        try:
            program: Any = torch.onnx.export(
                whole, (example[:_NUM_TRACED],), dynamo=True, dynamic_shapes=(free,), input_names=[INPUT],
                output_names=[OUTPUT], verbose=False,
            )  # fmt: skip
        except Exception as error:  # torch.export and its decompositions raise what they like, of an operation
            reason = f"torch cannot write this model as a graph: {_describe(error)}"
            raise ConfigError("mode.format=onnx", reason, _OTHER_FORMAT) from error
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        program.save(folder / ONNX_FILE, external_data=num_bytes > _MOST_BYTES)
        return _compare(whole, checked, folder / ONNX_FILE)


def _compare(model: nn.Module, inputs: Tensor, file: Path) -> float:
    """Return the largest relative difference between a graph and its model.

    Raises:
        ConfigError: onnxruntime cannot run it, or it is above the tolerance.
    """
    import onnxruntime

    expected: Tensor = model(inputs)
    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        computed = torch.from_numpy(session.run(None, {INPUT: inputs.contiguous().numpy()})[0])
    except Exception as error:  # classes of its own, which derive from nothing but Exception
        reason = f"onnxruntime cannot run the graph: {_describe(error)}"
        raise ConfigError("mode.format=onnx", reason, _OTHER_FORMAT) from error
    difference = float((computed - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if computed.shape != expected.shape or not difference <= TOLERANCE:
        reason = f"the outputs of the graph differ by {difference:.1e} from those of the model"
        raise ConfigError("mode.format=onnx", reason, _OTHER_FORMAT)
    return difference


def _describe(error: BaseException) -> str:
    """Return the cause at the root of an error of the exporter, one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextlib.contextmanager
def _with_one_flag_of_cudnn() -> Iterator[None]:
    """Set the older flag of TF32, which the exporter reads on the CPU, too (torch 2.13).

    It cannot be read where convolutions or recurrent layers have a precision of their own, as in every run.
    """
    cudnn: Any = torch.backends.cudnn
    before = [(part, part.fp32_precision) for part in (cudnn.conv, cudnn.rnn)]
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        for part, precision in before:
            part.fp32_precision = precision


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what the exporter prints: operators of packages that are not here, and its own deprecations."""
    of_exporter = logging.getLogger("torch.onnx")
    level = of_exporter.level
    of_exporter.setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            of_exporter.setLevel(level)
