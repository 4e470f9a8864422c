"""float16's loss scale inside a ZeRO optimizer over autocast, in the terms of torch.amp.GradScaler."""

from typing import Any

import torch

# torch.amp.GradScaler's defaults
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow until the scale doubles


def attach_scaler(optimizer: Any) -> None:
    """Make a ZeRO optimizer scale, unscale before it clips, and skip overflows on all ranks.

    Args:
        optimizer: DeepSpeed's.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    optimizer.loss_scaler = DynamicLossScaler(
        init_scale=INITIAL_SCALE,
        scale_window=GROWTH_INTERVAL,
        min_scale=2.0**-14,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
        dtype=torch.half,
    )
    optimizer.dynamic_loss_scale = True
    _grow_after_the_step(optimizer)


def _grow_after_the_step(optimizer: Any) -> None:
    """DeepSpeed 0.19.8 doubles the scale between the norm and the update, so that the gradients of that step,
    which carry the old scale, are divided by the new one: half an update where clipping does not act."""
    step, update_scale = optimizer.step, optimizer._update_scale
    has_grown = True

    def update_or_wait(has_overflow: bool = False) -> None:
        nonlocal has_grown
        has_grown = has_overflow
        if has_overflow:
            update_scale(has_overflow)

    def step_and_grow(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_grown
        result = step(*args, **kwargs)
        if not has_grown:
            has_grown = True
            update_scale(False)
        return result

    optimizer._update_scale, optimizer.step = update_or_wait, step_and_grow


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """As `GradScaler.state_dict` has it: the scale, and the steps since it last changed."""
    scaler = optimizer.loss_scaler
    return {
        "scale": scaler.cur_scale,
        "growth_factor": scaler.scale_factor,
        "backoff_factor": 1 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window,
    }


def load_scaler_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Go on with a scale and a count of steps."""
    scaler = optimizer.loss_scaler
    scaler.cur_scale = state["scale"]
    scaler.cur_iter, scaler.last_overflow_iter = state["_growth_tracker"], -1
