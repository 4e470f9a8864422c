"""Weight initialization from (seed, parameter name, shape) only, drawn on the CPU: 2 s for 124M parameters.

The values of a parameter do not depend on the number of ranks, the device, the order of modules, or other parameters.
A sharded parameter (DTensor) is drawn unsharded on every rank, one parameter at a time, and the rank keeps its shard:
no collectives, but every rank also draws the other shards. A parameter with a `fill_whole` method is set through it
(ZeRO-3).
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.adapter import is_adapter
from recipes.numerics.nf4 import fill_nf4, is_nf4
from recipes.parallel.placement import cut_box, find_box, local

INIT_STD = 0.02  # Radford et al. 2019 (GPT-2)
VALUE_WEIGHT = "value.weight"

# parts that wrappers add to a name; wrapping must not change the values of a parameter
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "base_layer.")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `model.named_parameters()` with names as without wrappers, tied parameters once.

    Adapter parameters are excluded. A copy of a parameter from another pipeline stage has the original's name.
    """
    # a list: filling a parameter may replace it in the model
    for name, parameter in list(model.named_parameters()):
        if not is_adapter(name):
            yield getattr(parameter, "copy_of", without_wrappers(name)), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `model.named_buffers()` with names as without wrappers."""
    for name, buffer in model.named_buffers():
        yield without_wrappers(name), buffer


def without_wrappers(name: str) -> str:
    """Return the name of a parameter or buffer as in a model without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def init_decoder(model: nn.Module, *, seed: int, num_layers: int, vocab_size: int) -> None:
    """Initialize every parameter of a decoder in place, by its name.

    `*bias` 0; `*norm.weight` 1; `*.out.weight`, at the end of the 2 L residual branches, normal with standard deviation
    0.02 / sqrt(2 L), so that the residual stream does not grow with depth (Radford et al. 2019, section 2.3); all
    others normal with 0.02; vocabulary padding rows and the head of values 0.

    Args:
        model: Model on any device, sharded or not.
        seed: Seed of the run.
        num_layers: L, number of blocks.
        vocab_size: Rows of `embedding.weight` and `head.weight` that are not padding.
    """
    for name, parameter in named_parameters(model):
        if name.endswith("bias"):
            constant_(parameter, 0.0)
        elif name.endswith("norm.weight"):
            constant_(parameter, 1.0)
        elif name == VALUE_WEIGHT:
            constant_(parameter, 0.0)
        else:
            residual = name.endswith(".out.weight")
            std = INIT_STD / math.sqrt(2 * num_layers) if residual else INIT_STD
            num_rows = vocab_size if name in ("embedding.weight", "head.weight") else None
            normal_(parameter, name=name, seed=seed, std=std, num_rows=num_rows)


def generator_for(name: str, *, seed: int) -> torch.Generator:
    """Return a CPU generator for the parameter `name`, seeded by sha256("seed/name").

    Only the first 32 bits are used: torch's Mersenne Twister ignores the rest.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy unsharded `values` into `parameter` or this rank's shard of it, quantizing for NF4."""
    assert parameter.shape == values.shape, f"{tuple(parameter.shape)} != {tuple(values.shape)}"
    if hasattr(parameter, "row_order"):  # tensor parallelism reorders stacked rows
        values = parameter.row_order.to_ranks(values)
    if hasattr(parameter, "fill_whole"):
        parameter.fill_whole(values)
    elif is_nf4(parameter):
        fill_nf4(parameter, values)
    elif isinstance(parameter, DTensor):
        parameter.to_local().copy_(cut_box(values, *find_box(parameter)))
    else:
        parameter.copy_(values)


def fill_through(parameter: Tensor, call: Callable[[Tensor], None]) -> None:
    """Make `fill` pass the unsharded values of a parameter to a function, and leave the parameter alone."""
    untyped: Any = parameter
    untyped.fill_whole = call


@torch.no_grad()
def normal_(parameter: Tensor, *, name: str, seed: int, std: float, num_rows: int | None = None) -> None:
    """Fill with samples from a normal distribution with mean zero.

    Args:
        parameter: Parameter on any device, in any dtype, sharded or not.
        name: Name of the parameter in its model.
        seed: Seed of the run.
        std: Standard deviation.
        num_rows: Number of rows to sample, so that padding does not change the values of other rows; the rest are
            zero. None: all rows.
    """
    rows = parameter.shape[0] if num_rows is None else num_rows
    values = torch.randn(  # always float32: the same values for every precision
        rows,
        *parameter.shape[1:],
        dtype=torch.float32,
        generator=generator_for(name, seed=seed),
    )
    fill(parameter, pad_rows(values.mul_(std), num_rows=parameter.shape[0]))


@torch.no_grad()
def constant_(parameter: Tensor, value: float) -> None:
    """Fill with one value."""
    if hasattr(parameter, "fill_whole"):
        fill(parameter, torch.full(parameter.shape, value, dtype=torch.float32))
        return
    local(parameter).fill_(value)


def unsharded_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter that may be sharded (DeepSpeed keeps it in `ds_shape`)."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def pad_rows(values: Tensor, *, num_rows: int) -> Tensor:
    """Return `values` padded with zero rows to `num_rows`; the same tensor if it already has that many."""
    if len(values) == num_rows:
        return values
    padding = values.new_zeros(num_rows - len(values), *values.shape[1:])
    return torch.cat([values, padding])
