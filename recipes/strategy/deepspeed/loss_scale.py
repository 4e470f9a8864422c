"""Loss scaling for float16 autocast inside a ZeRO optimizer, with the state of torch.amp.GradScaler."""

from typing import Any

import torch

# torch.amp.GradScaler's defaults
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale doubles


def attach_scaler(optimizer: Any) -> None:
    """Make a ZeRO optimizer scale the loss, unscale before clipping, and skip overflows on all ranks together.

    Args:
        optimizer: DeepSpeed's optimizer.
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
    """Grow the scale after the update instead of before it.

    DeepSpeed 0.19.8 doubles it between computing the norm and updating, so gradients scaled by the old scale are
    divided by the new one: the update is halved wherever clipping does not act.
    """
    step, update_scale = optimizer.step, optimizer._update_scale
    is_updated = True

    def update_only_on_overflow(has_overflow: bool = False) -> None:
        nonlocal is_updated
        is_updated = has_overflow
        if has_overflow:  # the step is skipped, so no gradient is unscaled
            update_scale(has_overflow)

    def step_then_grow(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_updated
        result = step(*args, **kwargs)
        if not is_updated:
            is_updated = True
            update_scale(False)
        return result

    optimizer._update_scale, optimizer.step = update_only_on_overflow, step_then_grow


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the state in the format of `GradScaler.state_dict`: the scale, and the steps since it last changed."""
    scaler = optimizer.loss_scaler
    return {
        "scale": scaler.cur_scale,
        "growth_factor": scaler.scale_factor,
        "backoff_factor": 1 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window,
    }


def load_scaler_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore a saved scale and step count."""
    scaler = optimizer.loss_scaler
    scaler.cur_scale = state["scale"]
    # DeepSpeed counts from the last overflow; if that is -1, `cur_iter` equals GradScaler's growth tracker
    scaler.cur_iter, scaler.last_overflow_iter = state["_growth_tracker"], -1
