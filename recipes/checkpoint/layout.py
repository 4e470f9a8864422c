"""Convert between Lightning's checkpoint dict and a folder: tensor names on disk, and the contents of run.pt.

Weights keep their names; optimizer state is `optimizer/<state>/<parameter>`, generator states `rng/<rank>/<source>`.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import Part

RUN_FILE = "run.pt"
_OPTIMIZER, _RNG = "optimizer", "rng"
State = dict[str, Any]


# --- names ---


def shard_name(rank: int) -> str:
    """Return the name of the file with one rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Return whether a file of a checkpoint holds tensors."""
    return Path(name).suffix == ".safetensors"


# --- Lightning's checkpoint -> plain data and tensors, and back ---


def split_state(checkpoint: State, *, rank: int) -> tuple[State, dict[str, Part]]:
    """Separate plain data from the tensors that this rank writes.

    Args:
        checkpoint: Lightning's checkpoint, with `Part` for tensors and four more keys: `rng`, the generator states of
            this rank; `parameters`, the names of its optimizer's parameters; `every_parameter`, those of all ranks,
            which may have other layers; `tied`, names that share the tensor of another name.
        rank: Rank of this process.

    Returns:
        Plain data, and shards by their names on disk.
    """
    parts = {name: part for name, part in checkpoint["state_dict"].items() if name not in checkpoint["tied"]}
    parts |= {f"{_RNG}/{rank}/{source}": part for source, part in checkpoint["rng"].items()}
    optimizers = []
    own: list[str] = checkpoint["parameters"]
    every: list[str] = checkpoint.get("every_parameter") or own
    number = {name: index for index, name in enumerate(every)}
    for optimizer in checkpoint["optimizer_states"]:
        # include entries without tensors: rank 0, which writes run.pt, may hold no shard of some parameters
        state: dict[int, State] = {number[own[index]]: {} for index in optimizer["state"]}
        for index, values in optimizer["state"].items():
            for key, value in values.items():
                if isinstance(value, Part):
                    parts[f"{_OPTIMIZER}/{key}/{own[index]}"] = value
                else:
                    state[number[own[index]]][key] = value
        optimizers.append(optimizer | {"state": state})
    left_out = ("state_dict", "every_parameter", _RNG)
    plain = {key: value for key, value in checkpoint.items() if key not in left_out}
    return plain | {"parameters": every, "optimizer_states": optimizers}, parts


def select_state(optimizer: State, saved: list[str], own: list[str], tied: Mapping[str, str]) -> State:
    """Return the optimizer state of a rank's parameters, in the order of its own optimizer.

    Args:
        optimizer: Optimizer state from `merge_state`, in the order of `saved`.
        saved: Names of all parameters of the saving run.
        own: Names of this rank's parameters, in the order of its optimizer.
        tied: Names that share the tensor of another name.
    """
    if own == saved:
        return optimizer
    number = {name: index for index, name in enumerate(saved)}
    numbers = [number.get(tied.get(name, name)) for name in own]
    state = {i: optimizer["state"][n] for i, n in enumerate(numbers) if n is not None and n in optimizer["state"]}
    return optimizer | {"state": state}


def merge_state(plain: State, tensors: Mapping[str, SavedTensor]) -> State:
    """Rebuild Lightning's checkpoint, with `SavedTensor` for tensors and the states of every rank under `rng`."""
    weights: State = {}
    index_by_name = {name: index for index, name in enumerate(plain["parameters"])}
    [optimizer] = plain["optimizer_states"]
    state = {index: dict(values) for index, values in optimizer["state"].items()}
    rng: dict[int, State] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        middle, _, last = rest.partition("/")
        if kind == _OPTIMIZER:
            state.setdefault(index_by_name[last], {})[middle] = tensor
        elif kind == _RNG:
            rng.setdefault(int(middle), {})[last] = tensor
        else:
            weights[name] = tensor
    weights |= {name: weights[other] for name, other in plain["tied"].items()}
    return plain | {
        "state_dict": weights,
        "optimizer_states": [optimizer | {"state": dict(sorted(state.items()))}],
        _RNG: [rng[rank] for rank in sorted(rng)],
    }


# --- plain data -> bytes ---


def serialize(plain: Mapping[str, Any]) -> bytes:
    """Serialize plain data with `torch.save`.

    Raises:
        TypeError: A value could not be loaded again, such as a path in the state of a callback.
    """
    content, reason = _round_trip(dict(plain))
    if reason is not None:
        raise TypeError(
            f"the state under {_find_key(plain)} is not plain data: {reason}; keep numbers, strings, lists and dicts"
            " there"
        )
    return content


def _round_trip(value: Any) -> tuple[bytes, str | None]:
    """Return the bytes, and the error when loading them; None if they load."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "GLOBAL" in line), lines[0])
        return b"", reason.split(" was not an allowed")[0]
    return file.getvalue(), None


def _find_key(plain: Mapping[str, Any]) -> str:
    """Return the key of the value that cannot be loaded, and the key within it."""
    for key, value in plain.items():
        if _round_trip(value)[1] is None:
            continue
        inner = value if isinstance(value, Mapping) else {}
        wrong = (name for name, entry in inner.items() if _round_trip(entry)[1] is not None)
        return "/".join([key, *[str(name) for name in wrong][:1]])
    return "several keys"
