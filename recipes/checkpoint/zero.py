"""A DeepSpeed optimizer's state as torch's optimizer would have it on one device. One all-reduce a tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class ZeroState:
    """Reads and writes what ZeRO has flattened and divided, parameter by parameter, whole.

    DeepSpeed's own files hold one world size and one stage; these tensors fit every strategy.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters in torch's order, before DeepSpeed puts flat ones in their place."""
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]

    @torch.no_grad()
    def model(self, module: nn.Module, *, keep: bool) -> dict[str, Any]:
        """Every tensor of a module, from the float32 master copy where there is one. A collective.

        Args:
            module: What DeepSpeed's engine wraps.
            keep: Whether this rank wants the tensors.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        whole: dict[str, Any] = {}
        seen: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in seen:
                master = safe_get_full_fp32_param(parameter)
                value = _whole(parameter) if master is None else master.view(_shape(parameter))
                seen[id(parameter)] = value.cpu() if keep else value.new_empty(0)
            whole[name] = seen[id(parameter)]
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                whole[name] = buffer.cpu()
        return whole if keep else {}

    @torch.no_grad()
    def optimizer(self, optimizer: Any, *, keep: bool) -> dict[str, Any]:
        """Moments and hyper-parameters, keyed as torch's `state_dict` is. A collective.

        Args:
            optimizer: DeepSpeed's.
            keep: Whether this rank wants the tensors.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        state: dict[int, dict[str, Any]] = {}
        _link(optimizer)
        moments, scalars = _kinds_of_state(optimizer.optimizer)
        for index, parameter in enumerate(self._parameters):
            # a tensor of its own each: torch's optimizers count steps in place
            of_parameter: dict[str, Any] = {name: value.clone() for name, value in scalars.items()}
            for name in moments:
                value = safe_get_full_optimizer_state(parameter, name)
                of_parameter[name] = value.view(_shape(parameter)).cpu() if keep else None
            if of_parameter:
                state[index] = of_parameter
        return {"state": state, "param_groups": self._groups(optimizer)} if keep else {}

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
    def load_model(self, module: nn.Module, whole: Mapping[str, Tensor]) -> None:
        """Copy whole tensors into this rank's part of weights and master copy. No collective.

        Args:
            module: What DeepSpeed's engine wraps.
            whole: Every tensor by name.
        """
        for name, parameter in module.named_parameters():
            _write(parameter, whole[name])
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                buffer.copy_(whole[name])

    @torch.no_grad()
    def load_optimizer(self, optimizer: Any, whole: dict[str, Any]) -> None:
        """Give DeepSpeed's optimizer the moments of a whole one. No collective.

        Args:
            optimizer: DeepSpeed's, before its first step.
            whole: As torch's `state_dict`.
        """
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not whole["state"]:
            return
        _make_state(optimizer, next(iter(whole["state"].values())))
        for index, parameter in enumerate(self._parameters):
            for name, value in whole["state"][index].items():
                if not (isinstance(value, Tensor) and value.ndim > 0):
                    continue
                if hasattr(parameter, "ds_id"):
                    safe_set_local_optimizer_state(parameter, _part(parameter, value), name)
                else:
                    safe_set_full_optimizer_state(parameter, value, name)


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


def _make_state(optimizer: Any, example: dict[str, Any]) -> None:
    """Empty state for every flat partition; DeepSpeed makes it in the first step."""
    base = optimizer.optimizer
    stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    flats = (
        optimizer.fp32_partitioned_groups_flat
        if stage_3
        else optimizer.single_partition_of_fp32_groups
    )
    as_number = type(base).__name__ == "DeepSpeedCPUAdam"  # counts steps in an int
    fused = base.param_groups[0].get("fused")  # counts them on the device
    for flat in flats:
        state: dict[str, Any] = {}
        for name, value in example.items():
            if value.ndim:
                state[name] = torch.zeros_like(flat.data)
            elif as_number:
                state[name] = int(value)
            else:
                state[name] = value.to(flat.device, copy=True) if fused else value.clone()
        base.state[flat] = state
    _link(optimizer)


def _link(optimizer: Any) -> None:
    """Tell each parameter where its moments are; DeepSpeed 0.19.8 does so when only the first group has any."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _write(parameter: Any, value: Tensor) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if hasattr(parameter, "ds_id"):
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, _part(parameter, value))
        parameter.ds_tensor.copy_(_part(parameter, value))
        if parameter.numel() == value.numel():  # small ones stay whole on every rank
            parameter.data.copy_(value)
        return
    if hasattr(parameter, "_hp_mapping"):
        safe_set_full_fp32_param(parameter, value)
    parameter.data.copy_(value)


def _part(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, flat, padded with zeros to equal parts."""
    size = parameter.ds_tensor.ds_numel
    start = size * torch.distributed.get_rank()
    mine = whole.flatten()[start : start + size]
    return torch.cat([mine, mine.new_zeros(size - len(mine))])


def _whole(parameter: Any) -> Tensor:
    """A parameter that is not trained has no master copy."""
    if not hasattr(parameter, "ds_id"):
        return parameter.data  # type: ignore[no-any-return]
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.data.clone()  # type: ignore[no-any-return]


def _shape(parameter: Any) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _group_of(optimizer: Any, parameter: Any) -> int:
    sub_group = next(
        index
        for index, members in enumerate(optimizer.fp16_groups)
        if any(member is parameter for member in members)
    )
    group: int = optimizer.sub_group_to_group_id[sub_group]
    return group
