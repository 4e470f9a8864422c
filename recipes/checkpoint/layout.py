"""Convert between Lightning's checkpoint dict and a folder: tensor names on disk, and the contents of run.pt.

Weights keep their names; optimizer state is `optimizer/<state>/<parameter>`, generator states `rng/<rank>/<source>`.
What a rank keeps that is neither a weight nor a sharded or replicated tensor is `values/<rank>`: serialized plain data.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shard_file import DTYPES, Part
from recipes.errors import ConfigError
from recipes.foreign_file import FormatError
from recipes.numerics.ema import NAME as AVERAGE
from recipes.numerics.ema import OPTIMIZER_AVERAGE

RUN_FILE = "run.pt"
FLATS = "flats"  # key of what ZeRO's flat partitions of a rank keep beside per-element state
_OPTIMIZER, _RNG, _VALUES = "optimizer", "rng", "values"
_TENSORS = "tensors"  # key of the dtypes and shapes of what rank 0 writes, by name on disk
State = dict[str, Any]


# --- names ---


def shard_name(rank: int) -> str:
    """Return the name of the file with one rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Return whether a file of a checkpoint holds tensors."""
    return Path(name).suffix == ".safetensors"


# --- Lightning's checkpoint -> plain data and tensors, and back ---


def split_state(checkpoint: State, *, rank: int) -> tuple[State, State, dict[str, Part]]:
    """Separate plain data of the run, plain data of this rank, and the tensors that this rank writes.

    Args:
        checkpoint: Lightning's checkpoint, with `Part` for tensors and five more keys: `rng`, the generator states of
            this rank; `parameters`, the names of its optimizer's parameters; `every_parameter`, those of all ranks,
            which may have other layers; `tied`, names that share the tensor of another name; `group_values`, what the
            optimizer keeps in its parameter groups.
        rank: Rank of this process.

    Returns:
        Plain data of the run, which rank 0 writes; plain data of this rank, empty if there is none; and shards by
        their names on disk.
    """
    parts = {name: part for name, part in checkpoint["state_dict"].items() if name not in checkpoint["tied"]}
    parts |= {f"{_RNG}/{rank}/{source}": part for source, part in checkpoint["rng"].items()}
    own: list[str] = checkpoint["parameters"]
    every: list[str] = checkpoint.get("every_parameter") or own
    [optimizer] = checkpoint["optimizer_states"]
    # keys that are no parameter: some optimizers keep state of the whole model under a name
    others = {key: value for key, value in optimizer["state"].items() if not isinstance(key, int)}
    of_parameters: dict[str, State] = {}
    for index, values in optimizer["state"].items():
        for key, value in values.items() if index not in others else ():
            if isinstance(value, Part):
                parts[f"{_OPTIMIZER}/{key}/{own[index]}"] = value
            else:
                of_parameters.setdefault(own[index], {})[key] = value
    kept = {
        "parameters": of_parameters,
        "groups": checkpoint["group_values"] if any(checkpoint["group_values"]) else [],
        "others": others,
        "top": {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")},
    }
    of_rank: State = {"optimizer": kept} if any(kept.values()) else {}
    if rank and checkpoint.get("callbacks"):
        of_rank["callbacks"] = checkpoint["callbacks"]
    left_out = ("state_dict", "every_parameter", "group_values", _RNG)
    plain = {key: value for key, value in checkpoint.items() if key not in left_out}
    plain |= {"parameters": every, "optimizer_states": [{"param_groups": optimizer["param_groups"]}]}
    plain[_TENSORS] = {name: [DTYPES[part.tensor.dtype], *part.unsharded_shape] for name, part in parts.items()}
    return plain, of_rank, parts


def values_part(of_rank: State, *, rank: int) -> dict[str, Part]:
    """Return the plain data of a rank as a tensor under its name on disk; nothing if there is none.

    Raises:
        TypeError: A value could not be loaded again.
    """
    if not of_rank:
        return {}
    content = torch.frombuffer(bytearray(serialize(of_rank)), dtype=torch.uint8)  # [bytes]
    return {f"{_VALUES}/{rank}": Part(tensor=content, offsets=(0,), unsharded_shape=content.shape)}


def read_values(checkpoint: State, rank: int) -> State:
    """Return the plain data of one rank that saved a checkpoint; empty if it had none."""
    saved: SavedTensor | None = checkpoint[_VALUES].get(rank)
    if saved is None:
        return {}
    file = io.BytesIO(saved.read().numpy().tobytes())
    of_rank: State = torch.load(file, map_location=_to_own_device, weights_only=True)
    return of_rank


def _to_own_device(storage: Any, location: str) -> Any:
    """Put a tensor that was on a GPU on that of this rank, if it has one; any other stays in host memory."""
    return storage.cuda() if location.startswith("cuda") and torch.cuda.is_available() else storage


def merge_optimizer_values(checkpoint: State, *, rank: int, is_same_mesh: bool) -> State:
    """Return what an optimizer keeps beside sharded and replicated tensors, from the ranks that saved it.

    On the same mesh a rank gets its own values back, and of parameters that it saved none of, those of another rank,
    which saved them for all. On another mesh shards have other owners: values are taken if all ranks agree.

    Args:
        checkpoint: Checkpoint from `merge_state`.
        rank: Rank of this process.
        is_same_mesh: Whether this run has the strategy and the mesh of the saving run.

    Returns:
        `parameters`, values by name of the parameter and key; `groups`, a list of the values of each parameter group;
        `others`, state under keys that are no parameter; `top`, further keys of the optimizer's `state_dict`.

    Raises:
        ConfigError: Ranks of another mesh keep different values.
    """
    saved = [read_values(checkpoint, saving_rank).get("optimizer", {}) for saving_rank in range(len(checkpoint[_RNG]))]
    parameters: dict[str, State] = {}
    for of_rank in saved:
        for name, values in of_rank.get("parameters", {}).items():
            for key, value in values.items():
                known = parameters.setdefault(name, {}).setdefault(key, value)
                if not is_same_mesh and not are_equal(known, value):
                    raise _differs(checkpoint, f"{name}/{key}")
    own = saved[rank] if is_same_mesh else saved[0]
    flats = own.get("top", {}).get(FLATS, [])
    if not is_same_mesh and flats:
        # beside each parameter is what a parameter can take: scalars, if all partitions have the same
        kept = next(iter(own.get("parameters", {}).values()), {}).keys() | {"step"}
        if any(not are_equal(values, flats[0]) or values.keys() - kept for values in flats):
            raise _differs(checkpoint, "the partitions of ZeRO")
    for name, values in own.get("parameters", {}).items():
        parameters[name] |= values
    # a group or key that a rank did not save has the value of the config there
    for section in ("groups", "others", "top") if not is_same_mesh else ():
        if any(not are_equal(of_rank.get(section) or {}, own.get(section) or {}) for of_rank in saved):
            raise _differs(checkpoint, f"its {section}")
    return {
        "parameters": parameters,
        "groups": own.get("groups", []),
        "others": own.get("others", {}),
        "top": {key: value for key, value in own.get("top", {}).items() if is_same_mesh or key != FLATS},
    }


def _differs(checkpoint: State, what: str) -> ConfigError:
    return ConfigError(
        f"resume=… trainer.devices and sizes of the mesh with {checkpoint['optimizer']}",
        f"its ranks keep different values of {what}, each for its own shards",
        "resume=… with the strategy, the number of devices and the mesh of the checkpoint",
    )


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type and bits; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        is_alike = one.shape == other.shape and one.dtype == other.dtype
        return is_alike and torch.equal(one, other.to(one.device))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other or (one != one and other != other))


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
    """Rebuild Lightning's checkpoint, with `SavedTensor` for tensors and two more keys.

    `rng` has the generator states of every rank, `values` the serialized plain data of the ranks that have some.

    Raises:
        FormatError: A tensor that was saved is missing, or is another.
    """
    for name, (dtype, *shape) in plain.get(_TENSORS, {}).items():  # none from earlier versions
        if name not in tensors:
            raise FormatError(f"it lacks {name}")
        if (found := tensors[name]).dtype != dtype or [*found.shape] != shape:
            raise FormatError(f"{name} is {found.dtype} of {[*found.shape]}, and was saved as {dtype} of {shape}")
    weights: State = {}
    index_by_name = {name: index for index, name in enumerate(plain["parameters"])}
    [optimizer] = plain["optimizer_states"]
    state: dict[int, State] = {}
    rng: dict[int, State] = {}
    values: dict[int, SavedTensor] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        middle, _, last = rest.partition("/")
        if kind == _OPTIMIZER:
            state.setdefault(index_by_name[last], {})[middle] = tensor
        elif kind == _RNG:
            rng.setdefault(int(middle), {})[last] = tensor
        elif kind == _VALUES:
            values[int(middle)] = tensor
        else:
            weights[name] = tensor
    weights |= {name: weights[other] for name, other in plain["tied"].items()}
    return plain | {
        "state_dict": weights,
        "optimizer_states": [optimizer | {"state": dict(sorted(state.items()))}],
        _RNG: [rng[rank] for rank in sorted(rng)],
        _VALUES: dict(sorted(values.items())),
    }


def select_weights(state: State, weights: str, *, setting: str, fix: str) -> State:
    """Return the model's state dict: the weights as trained, or averaged where there is an average.

    Buffers and frozen weights have no average.

    Args:
        state: Checkpoint from `merge_state`.
        weights: `trained`, or `ema` for their moving average.
        setting: What was set, for the error.
        fix: What to type without an average.

    Raises:
        ConfigError: There is no average.
    """
    state_dict: State = state["state_dict"]
    if weights == "trained":
        return state_dict
    optimizer_state = state["optimizer_states"][0]["state"]
    average = {
        name: optimizer_state[index][key]
        for index, name in enumerate(state["parameters"])
        for key in (OPTIMIZER_AVERAGE, AVERAGE)  # the last one wins: the average of ema_decay
        if key in optimizer_state.get(index, {})
    }
    if not average:
        reason = "the checkpoint holds no average of the weights: its run was trained without ema_decay"
        raise ConfigError(setting, reason, fix)
    tied = {name: average[other] for name, other in state["tied"].items() if other in average}
    return state_dict | average | tied


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


def is_loadable(value: Any) -> bool:
    """Return whether a value is plain data, which `serialize` accepts."""
    return _round_trip(value)[1] is None


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
