"""AdamW with 8-bit moments (arXiv 2110.02861): 2 bytes of state per parameter instead of 8.

Every 256 elements share a scale, and a code is one of 256 values between -1 and 1, denser near zero, spanning seven
decades. Updates are computed in float32; between steps the moments are quantized.

Shapes: E elements of a rank's shard of a parameter, B = ceil(E / 256) blocks.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from recipes.optimizer.groupwise import GroupwiseOptimizer
from recipes.optimizer.param_groups import decay_groups
from recipes.optimizer.shards import local

BLOCK = 256
_MIN_ELEMENTS = 4096  # below, moments stay float32: norms and biases are small but sensitive
_AT_ONCE = 2**22  # elements updated together, which bounds temporaries to 100 MiB
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(GroupwiseOptimizer):
    """AdamW whose moments are quantized to 8 bits between steps.

    `state_dict` returns them in float32, shaped like their parameters, so checkpoints are interchangeable with AdamW.
    Resuming on the same number of ranks restores the same codes.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed.
        lr: Peak learning rate; the scheduler multiplies it.
        betas: Decay rates of the first and second moment, per optimizer step.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay of matrices.
    """

    accepts_flat_partitions: ClassVar[bool] = False
    needs_unsharded: ClassVar[bool] = True
    state_of: ClassVar[str] = "AdamW"
    replicated_state: ClassVar[tuple[str, ...]] = ("step",)  # the same on all ranks, sharded or not

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Annotated[float, "> 0"],
        betas: tuple[Annotated[float, ">= 0, < 1"], Annotated[float, ">= 0, < 1"]],
        eps: Annotated[float, "> 0"],
        weight_decay: Annotated[float, ">= 0"],
    ) -> None:
        defaults = {"lr": lr, "betas": (float(betas[0]), float(betas[1])), "eps": eps}
        super().__init__(decay_groups(model, weight_decay=weight_decay), defaults)

    @override
    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None, "`step` leaves out parameters without a gradient"
            self._update(parameter, local(parameter.grad).flatten(), group)

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update the elements that this rank holds; `grad` is [E]."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = 0.0
            for name in _MOMENTS:
                state |= self._keep(name, torch.zeros_like(grad, dtype=torch.float32), parameter)
        state["step"] += 1
        step, weight = state["step"], local(parameter).view(-1)  # [E]
        for start in range(0, len(grad), _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, len(grad)))
            first, second = (self._read(state, name, part) for name in _MOMENTS)  # [e], float32
            _step(weight[part], grad[part].float(), first, second, step=step, group=group)
            for name, moment in zip(_MOMENTS, (first, second), strict=True):
                self._write(state, name, part, moment)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with moments in float32 and shaped like their parameters."""
        saved: dict[str, Any] = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved["state"] = {
            index: {name: value for name, value in values.items() if not name.endswith(("_codes", "_scales"))}
            | {name: _shape_as(self._read(values, name), parameters[index]) for name in _MOMENTS}
            | {"step": torch.tensor(values["step"], dtype=torch.float32)}
            for index, values in saved["state"].items()
        }
        return saved

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, values in state_dict["state"].items():
            parameter, state = parameters[index], dict[str, Any]()
            device = local(parameter).device
            for name, value in values.items():
                if name in _MOMENTS:
                    state |= self._keep(name, local(value).to(device, torch.float32).flatten(), parameter)
                else:
                    on_host = isinstance(value, Tensor) and not isinstance(value, DTensor)
                    state[name] = float(value) if name == "step" else value.to(device) if on_host else value
            self.state[parameter] = state

    def _keep(self, name: str, values: Tensor, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state entries of a moment [E]: codes and scales, or float32 values for a small parameter."""
        if parameter.numel() < _MIN_ELEMENTS:
            return {name: values}
        num_blocks = -(-len(values) // BLOCK)
        state = {
            f"{name}_codes": torch.empty_like(values, dtype=torch.uint8),  # [E]
            f"{name}_scales": torch.empty(num_blocks, dtype=torch.float32, device=values.device),  # [B]
        }
        for start in range(0, len(values), _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, len(values)))
            self._write(state, name, part, values[part])
        return state

    def _read(self, state: dict[str, Any], name: str, part: slice = slice(None)) -> Tensor:
        """Return elements of a moment in float32, [e]; `part` starts at a block boundary."""
        if f"{name}_codes" not in state:
            kept: Tensor = state[name][part]
            return kept
        codes = state[f"{name}_codes"][part]  # [e]
        scales = state[f"{name}_scales"][_blocks(part)]  # [b]
        of_elements = scales.repeat_interleave(BLOCK, output_size=len(scales) * BLOCK)[: len(codes)]  # [e]
        table, _ = self._get_table(name, codes.device)
        return table[codes.int()].mul_(of_elements)

    def _write(self, state: dict[str, Any], name: str, part: slice, values: Tensor) -> None:
        """Quantize elements of a moment [e]; those of small parameters were updated in place."""
        if f"{name}_codes" not in state:
            return
        padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)  # [b, 256]
        # the value of largest magnitude, with its sign: its code is 1.0, so that requantizing gives the same codes
        scales = padded.gather(1, padded.abs().argmax(dim=1, keepdim=True))  # [b, 1]
        _, middles = self._get_table(name, values.device)
        relative = padded / torch.where(scales == 0, 1.0, scales)  # [b, 256], from -1 to 1
        codes = torch.bucketize(relative, middles, out_int32=True)  # [b, 256], the nearest
        if name == "exp_avg_sq":
            # round small second moments up, not to 0: dividing by the root of 0 would make a huge update
            codes = torch.where(relative > 0, codes.clamp(min=1), 0)
        state[f"{name}_codes"][part] = codes.view(-1)[: len(values)].to(torch.uint8)
        state[f"{name}_scales"][_blocks(part)] = scales.squeeze(1)

    def _get_table(self, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of the 256 codes of a moment, ascending, and the 255 midpoints between them.

        They are created once per device, so that later steps do not wait for a copy.
        """
        tables: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = self.__dict__.setdefault("_tables", {})
        if (name, device) not in tables:
            values = _make_codes(is_signed=name == "exp_avg").to(device, torch.float32)
            tables[name, device] = values, (values[1:] + values[:-1]) / 2
        return tables[name, device]


def _step(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, *, step: float, group: dict[str, Any]) -> None:
    """Apply an AdamW step in place; all tensors [e], moments and gradient in float32."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    first.lerp_(grad, 1 - beta1)
    second.lerp_(grad.square(), 1 - beta2)
    denominator = second.div(1 - beta2**step).sqrt_().add_(group["eps"])  # [e]
    weight.mul_(1 - lr * group["weight_decay"])
    weight.sub_((first / denominator).mul_(lr / (1 - beta1**step)))


def _blocks(part: slice) -> slice:
    return slice(None) if part.stop is None else slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _make_codes(*, is_signed: bool) -> Tensor:
    """Return the 256 values of the codes in ascending order: 0, 1, and the middles of 2^k intervals of each decade.

    With 2^0 to 2^6 intervals from the smallest decade to [0.1, 1], and both signs; without signs twice as many.
    """
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (not is_signed)) + 1, dtype=torch.float64)
        decades.append(10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2)
    positive = torch.cat(decades)
    values = torch.cat([positive, torch.tensor([0.0, 1.0], dtype=torch.float64), *([-positive] if is_signed else [])])
    return values.sort().values


def _shape_as(values: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's elements [E], shaped and sharded like their parameter."""
    shaped = torch.empty_like(parameter.detach(), dtype=values.dtype)
    part = local(shaped)
    part.copy_(values.view(part.shape))
    return shaped
