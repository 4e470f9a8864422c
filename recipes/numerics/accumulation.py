"""Global batch <-> micro-batches by exact division. Pure arithmetic, no imports that cost."""

from dataclasses import dataclass

from recipes.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How one global batch is carried out.

    Attributes:
        global_batch_size: Samples per optimizer step over all devices: the experiment.
        micro_batch_size: Samples per device per forward.
        num_micro_batches: Forward passes per device per optimizer step.
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int


def divide(
    *,
    global_batch_size: int,
    micro_batch_size: int | None,
    num_devices: int,
    accumulate_grad_batches: int | None,
) -> Accumulation:
    """Split a global batch into equal micro-batches.

    Args:
        global_batch_size: Samples per optimizer step over all devices.
        micro_batch_size: Samples per device per forward; None: follows from the others.
        num_devices: Ranks that share the global batch.
        accumulate_grad_batches: Passes per optimizer step; None: follows from the others.

    Raises:
        ConfigError: The numbers do not divide, or contradict each other.
    """
    if micro_batch_size is None:
        passes = 1 if accumulate_grad_batches is None else accumulate_grad_batches
        once = passes * num_devices
        micro_batch_size = max(global_batch_size // once, 1)
        in_passes = "" if passes == 1 else f"{passes} micro-batches on "
        what = f"{in_passes}{_devices(num_devices)}"
    else:
        once = micro_batch_size * num_devices
        passes = max(global_batch_size // once, 1)
        what = f"micro-batches of {micro_batch_size} on {_devices(num_devices)}"
    if global_batch_size % once:
        raise ConfigError(
            f"global_batch_size={global_batch_size}",
            f"{global_batch_size} samples do not divide into {what}",
            f"global_batch_size={_multiples_around(global_batch_size, once)}",
        )
    if accumulate_grad_batches not in (None, passes):
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulate_grad_batches}",
            f"global_batch_size={global_batch_size} in {what} takes {passes} passes",
            f"trainer.accumulate_grad_batches={passes}",
        )
    return Accumulation(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=passes,
    )


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def _multiples_around(number: int, step: int) -> str:
    below, above = number // step * step, -(-number // step) * step
    return f"{above} (or {below})" if below else f"{above}"


def steps_of(num_samples: int, global_batch_size: int, parts: int = 1) -> int:
    """Optimizer steps in which so many samples are consumed, or one of equal parts of them; `${steps_of:…}` in conf/.

    Raises:
        ValueError: It is no whole number of steps.
    """
    steps, rest = divmod(num_samples, global_batch_size * parts)
    if rest or steps < 1:
        of = f" in {parts} parts" if parts > 1 else ""
        raise ValueError(
            f"{num_samples} samples{of} are no whole number of steps of {global_batch_size} samples"
        )
    return steps
