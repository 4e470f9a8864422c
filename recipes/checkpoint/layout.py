"""Between Lightning's checkpoint and a folder: which tensor has which name on disk, and what stays in run.pt.

Weights keep their names; moments are `optimizer/<which>/<parameter>`, random numbers `rng/<rank>/<source>`.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.checkpoint.shard_file import Part, SavedTensor

RUN_FILE = "run.pt"
_OPTIMIZER, _RNG = "optimizer", "rng"
State = dict[str, Any]


def shard_name(rank: int) -> str:
    """The file of one rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Whether a file of a checkpoint holds tensors."""
    return Path(name).suffix == ".safetensors"


def split_state(checkpoint: State, *, rank: int) -> tuple[State, dict[str, Part]]:
    """Separate what is plain data from the tensors that this rank writes.

    Args:
        checkpoint: Lightning's, with `Part` for tensors, the random numbers of this rank in `rng`, the names of the
            optimizer's parameters in `parameters` and, in `tied`, names that stand for the tensor of another name.
        rank: This one.

    Returns:
        Plain data, and parts by their names on disk.
    """
    parts = {
        name: part
        for name, part in checkpoint["state_dict"].items()
        if name not in checkpoint["tied"]
    }
    parts |= {f"{_RNG}/{rank}/{device}": part for device, part in checkpoint["rng"].items()}
    states = []
    for optimizer in checkpoint["optimizer_states"]:
        parts |= dict(_moments(optimizer["state"], checkpoint["parameters"]))
        states.append(optimizer | {"state": _without_parts(optimizer["state"])})
    plain = {key: value for key, value in checkpoint.items() if key not in ("state_dict", _RNG)}
    return plain | {"optimizer_states": states}, parts


def merge_state(plain: State, tensors: Mapping[str, SavedTensor]) -> State:
    """Lightning's checkpoint again, with `SavedTensor` for tensors and the random numbers of every rank in `rng`."""
    weights: State = {}
    number = {name: index for index, name in enumerate(plain["parameters"])}
    [optimizer] = plain["optimizer_states"]
    state = {index: dict(values) for index, values in optimizer["state"].items()}
    random: dict[int, State] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        which, _, of = rest.partition("/")
        if kind == _OPTIMIZER:
            state.setdefault(number[of], {})[which] = tensor
        elif kind == _RNG:
            random.setdefault(int(which), {})[of] = tensor
        else:
            weights[name] = tensor
    weights |= {name: weights[other] for name, other in plain["tied"].items()}
    return plain | {
        "state_dict": weights,
        "optimizer_states": [optimizer | {"state": dict(sorted(state.items()))}],
        _RNG: [random[rank] for rank in sorted(random)],
    }


def _moments(state: Mapping[int, State], names: list[str]) -> Iterator[tuple[str, Part]]:
    for index, of_parameter in state.items():
        for which, value in of_parameter.items():
            if isinstance(value, Part):
                yield f"{_OPTIMIZER}/{which}/{names[index]}", value


def _without_parts(state: Mapping[int, State]) -> dict[int, State]:
    """Keeps the parameters and what is no tensor: a rank may hold no part of a moment."""
    return {
        index: {key: value for key, value in of_parameter.items() if not isinstance(value, Part)}
        for index, of_parameter in state.items()
    }


def serialized(plain: Mapping[str, Any]) -> bytes:
    """As torch writes it.

    Raises:
        TypeError: Something in it would not be read back, such as a path in the state of a callback.
    """
    content, why = _round_trip(dict(plain))
    if why is not None:
        raise TypeError(
            f"the state under {_where(plain)} is no plain data: {why}; keep numbers, strings, lists and dicts there"
        )
    return content


def _round_trip(value: Any) -> tuple[bytes, str | None]:
    """The bytes, and why they could not be loaded."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if "GLOBAL" in line), lines[0])
        return b"", why.split(" was not an allowed")[0]
    return file.getvalue(), None


def _where(plain: Mapping[str, Any]) -> str:
    """The key of what cannot be loaded, and the key in it."""
    for key, value in plain.items():
        if _round_trip(value)[1] is None:
            continue
        inner = value if isinstance(value, Mapping) else {}
        wrong = (name for name, one in inner.items() if _round_trip(one)[1] is not None)
        return "/".join([key, *[str(name) for name in wrong][:1]])
    return "several keys"
