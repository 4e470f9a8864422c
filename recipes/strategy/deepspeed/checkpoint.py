"""A DeepSpeed optimizer's state under the names torch's optimizer would have it by, divided as ZeRO divides it."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recipes.checkpoint.shard_file import Part, SavedTensor
from recipes.checkpoint.shards import get_shards, unsharded_part
from recipes.strategy.deepspeed import checkpoint_stage3 as zero_3


class ZeroState:
    """Hands over what this rank holds of weights and moments, and takes its part of saved ones. No collective.

    DeepSpeed's own files fit one world size and one stage, and hold pickled objects; these parts fit every strategy.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters in torch's order, before DeepSpeed puts flat ones in their place."""
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]

    @torch.no_grad()
    def model(self, module: nn.Module, *, writes_whole: bool) -> dict[str, Part]:
        """This rank's parts of a module, from the float32 master copy where there is one.

        Args:
            module: What DeepSpeed's engine wraps.
            writes_whole: Whether this rank writes what every rank holds whole.
        """
        parts: dict[str, Part] = {}
        engine = _stage_3_optimizer(module.parameters())
        held = zero_3.read_fragments(engine, [None]) if engine is not None else {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if hasattr(parameter, "ds_id"):
                frozen = parameter.ds_tensor  # type: ignore[attr-defined]
                mine = held[parameter][None] if parameter in held else frozen
                part = zero_3.part_of(parameter, mine)
            else:
                part = _part(parameter, None, writes_whole=writes_whole)
            if part is not None:
                parts[name] = part
        persistent = module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
        return parts | get_shards(buffers, constant=(), writes_whole=writes_whole)

    @torch.no_grad()
    def optimizer(self, optimizer: Any, *, writes_whole: bool) -> dict[str, Any]:
        """This rank's parts of the moments, keyed as torch's `state_dict` is, and hyper-parameters.

        Args:
            optimizer: DeepSpeed's.
            writes_whole: Whether this rank writes what every rank holds whole.
        """
        state: dict[int, dict[str, Part]] = {}
        _link(optimizer)
        moments, scalars = _kinds_of_state(optimizer.optimizer)
        sharded = is_stage_3(optimizer)
        held = zero_3.read_fragments(optimizer, moments) if sharded else {}
        for index, parameter in enumerate(self._parameters):
            parts = {
                name: zero_3.part_of(parameter, held[parameter][name])
                if sharded
                else _part(parameter, name, writes_whole=False)
                for name in moments
            }
            state[index] = {name: part for name, part in parts.items() if part is not None}
            if writes_whole:
                state[index] |= {name: unsharded_part(value) for name, value in scalars.items()}
        return {
            "state": state if moments or scalars else {},
            "param_groups": self._groups(optimizer),
        }

    def _groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """Hyper-parameters with the numbers of the parameters they belong to: matrices first, then vectors."""
        number = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        members = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else None
        groups, start = [], 0
        for index, group in enumerate(optimizer.param_groups):
            kept = {key: value for key, value in group.items() if key != "params"}
            if members is not None:
                numbers = sorted(number[id(parameter)] for parameter in members[index])
            else:
                numbers = [
                    position
                    for position, parameter in enumerate(self._parameters)
                    if position >= start and _group_of(optimizer, parameter) == index
                ]
            groups.append(kept | {"params": numbers})
            start = numbers[-1] + 1 if numbers else start
        return groups

    @torch.no_grad()
    def load_model(self, module: nn.Module, saved: Mapping[str, SavedTensor]) -> None:
        """Copy saved tensors into this rank's part of weights and master copy.

        Args:
            module: What DeepSpeed's engine wraps.
            saved: Every tensor by name.
        """
        named = dict(module.named_parameters())
        engine = _stage_3_optimizer(named.values())
        if engine is not None:
            zero_3.write_weights(engine, {one: saved[name] for name, one in named.items()})
        for name, parameter in named.items():
            if not hasattr(parameter, "ds_id"):
                _write(parameter, saved[name])
            elif not parameter.requires_grad:
                zero_3.write_frozen(parameter, saved[name])
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                buffer.copy_(saved[name].whole())

    @torch.no_grad()
    def load_optimizer(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Give DeepSpeed's optimizer saved moments.

        Args:
            optimizer: DeepSpeed's, before its first step.
            saved: As torch's `state_dict`, with `SavedTensor` for tensors.
        """
        if not any(saved["state"].values()):
            return
        moments = {
            parameter: {name: value for name, value in saved["state"][index].items() if value.shape}
            for index, parameter in enumerate(self._parameters)
        }
        scalars = _scalars(optimizer, next(iter(saved["state"].values())))
        if is_stage_3(optimizer):
            zero_3.write_moments(optimizer, moments, scalars)
            return
        for flat in optimizer.single_partition_of_fp32_groups:
            zeros = {name: torch.zeros_like(flat.data) for name in moments[self._parameters[0]]}
            optimizer.optimizer.state[flat] = {**copy.deepcopy(scalars), **zeros}
        _link(optimizer)
        for parameter, values in moments.items():
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            for name, value in values.items() if mapping is not None else ():
                mapping.get_hp_fragment(name).copy_(_range(mapping, value))


def _kinds_of_state(optimizer: torch.optim.Optimizer) -> tuple[list[str], dict[str, Tensor]]:
    """Names of what each element has, and the numbers that a whole parameter has, such as Adam's step."""
    for state in optimizer.state.values():
        moments = [name for name, value in state.items() if getattr(value, "ndim", 0) > 0]
        scalars: dict[str, Tensor] = {
            name: torch.as_tensor(value, dtype=torch.float32).cpu()
            for name, value in state.items()
            if name not in moments and value is not None
        }
        return moments, scalars
    return [], {}


def _scalars(optimizer: Any, saved: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """What a whole parameter has, such as Adam's step, as the engine's optimizer keeps it."""
    base = optimizer.optimizer
    scalars = {name: value.whole() for name, value in saved.items() if not value.shape}
    if type(base).__name__ == "DeepSpeedCPUAdam":  # counts steps in an int
        count_up(base, int(scalars["step"]))
        return {name: int(value) for name, value in scalars.items()}
    fused = base.param_groups[0].get("fused")  # counts them on the device
    flats = (
        optimizer.fp32_partitioned_groups_flat
        if is_stage_3(optimizer)
        else optimizer.single_partition_of_fp32_groups
    )
    return {name: value.to(flats[0].device if fused else "cpu") for name, value in scalars.items()}


def count_up(optimizer: Any, num_steps: int) -> None:
    """Let DeepSpeedCPUAdam 0.19.8 multiply its powers of the betas step by step, as a run without interruption has.

    Asked for a later step it would compute them anew, which differs in the last bit. About 10 µs a step.
    """
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    weight, gradient, first, second = (torch.zeros(1) for _ in range(4))
    for step in range(1, num_steps + 1):
        optimizer.ds_opt_adam.adam_update(
            *(optimizer.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True),
            *(weight, gradient, first, second),
        )


def _link(optimizer: Any) -> None:
    """Tell each parameter where its moments are; DeepSpeed 0.19.8 does so when only the first group has any."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _part(parameter: Any, moment: str | None, *, writes_whole: bool) -> Part | None:
    """What this rank holds of a parameter's master copy or of a moment: a range of the flattened whole."""
    if not hasattr(parameter, "_hp_mapping"):  # not trained: there is no master copy
        return unsharded_part(parameter) if writes_whole else None
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    fragment = mapping.get_hp_fragment(moment)
    start = mapping.lp_fragment_address.start
    return Part(tensor=fragment.detach(), offsets=(start,), unsharded_shape=parameter.shape)


def _write(parameter: Any, saved: SavedTensor) -> None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        mapping.get_hp_fragment().copy_(_range(mapping, saved))
    parameter.data.copy_(saved.whole())


def _range(mapping: Any, saved: SavedTensor) -> Tensor:
    """The fragment that this rank holds at stages 1 and 2."""
    address = mapping.lp_fragment_address
    return saved.part(address.start, address.start + address.numel)


def is_stage_3(optimizer: Any) -> bool:
    """Whether DeepSpeed's optimizer is that of stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _stage_3_optimizer(parameters: Iterable[Any]) -> Any:
    """DeepSpeed's, as its parameters know it; None at the other stages."""
    known = (getattr(parameter, "_z3_optimizer", None) for parameter in parameters)
    return next((one for one in known if one is not None), None)


def _group_of(optimizer: Any, parameter: Any) -> int:
    sub_group = next(
        index
        for index, members in enumerate(optimizer.fp16_groups)
        if any(member is parameter for member in members)
    )
    group: int = optimizer.sub_group_to_group_id[sub_group]
    return group
