"""Split a global batch into equal micro-batches; pure arithmetic, does not import torch."""

from dataclasses import dataclass, replace

from recipes.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How a global batch is split into micro-batches.

    Attributes:
        global_batch_size: Samples per optimizer step over all devices.
        micro_batch_size: Samples per device per forward pass.
        num_micro_batches: Micro-batches per device per optimizer step.
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int

    def in_one(self) -> "Accumulation":
        """Return the same global batch as one micro-batch, which a pipeline schedule splits itself."""
        size = self.micro_batch_size * self.num_micro_batches
        return replace(self, micro_batch_size=size, num_micro_batches=1)


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
        micro_batch_size: Samples per device per forward pass; None derives it from the others.
        num_devices: Ranks that share the global batch.
        accumulate_grad_batches: Micro-batches per optimizer step; None derives it from the others.

    Raises:
        ConfigError: The global batch does not divide evenly, or the settings contradict each other.
    """
    if micro_batch_size is None:
        sizes = range(0)
        num_micro_batches = 1 if accumulate_grad_batches is None else accumulate_grad_batches
        unit = num_micro_batches * num_devices
        micro_batch_size = max(global_batch_size // unit, 1)
        count = "" if num_micro_batches == 1 else f"{num_micro_batches} micro-batches on "
        parts = f"{count}{_devices(num_devices)}"
    else:
        sizes = range(micro_batch_size - 1, 0, -1)  # which may divide it
        unit = micro_batch_size * num_devices
        num_micro_batches = max(global_batch_size // unit, 1)
        parts = f"micro-batches of {micro_batch_size} on {_devices(num_devices)}"
    if global_batch_size % unit:
        fitting = next((size for size in sizes if global_batch_size % (size * num_devices) == 0), None)
        smaller = "" if fitting is None else f", or micro_batch_size={fitting}"
        raise ConfigError(
            f"global_batch_size={global_batch_size}",
            f"{global_batch_size} samples do not divide evenly into {parts}",
            f"global_batch_size={_multiples_around(global_batch_size, unit)}{smaller}",
        )
    if accumulate_grad_batches not in (None, num_micro_batches):
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulate_grad_batches}",
            f"global_batch_size={global_batch_size} in {parts} needs {num_micro_batches} accumulation steps",
            f"trainer.accumulate_grad_batches={num_micro_batches}",
        )
    return Accumulation(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
    )


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def _multiples_around(number: int, unit: int) -> str:
    below, above = number // unit * unit, -(-number // unit) * unit
    return f"{above} (or {below})" if below else f"{above}"


def steps_of(num_samples: int, global_batch_size: int, parts: int = 1) -> int:
    """Return the optimizer steps that consume a number of samples; `${steps_of:…}` in conf/.

    Args:
        num_samples: Samples to consume.
        global_batch_size: Samples per optimizer step.
        parts: Divide the steps by this number.

    Raises:
        ValueError: The number of steps is not an integer.
    """
    steps, rest = divmod(num_samples, global_batch_size * parts)
    if rest or steps < 1:
        of_parts = f" in {parts} parts" if parts > 1 else ""
        raise ValueError(
            f"{num_samples} samples{of_parts} are not a whole number of steps of {global_batch_size} samples"
        )
    return steps
