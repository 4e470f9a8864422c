"""Check runs that mix images: pairs of them in every micro-batch, and a loss that reads targets of two classes."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import read_target_kinds
from recipes.errors import ConfigError

_SOFT = {
    "probabilities",
    "labels",
    "values",
}  # targets that are numbers: one can be between two others


def check_mixing(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check the batch and the loss of a run with mixup or cutmix; nothing of other runs.

    Args:
        run: Composed run whose nodes match their signatures.
        has_ranks: Whether its number of ranks is valid, else that is reported separately.
    """
    mixed = _name_mixing(run.config["data"].get("transform"))
    if not mixed or not run.mode.takes_steps:
        return
    off = " ".join(f"{setting.partition('=')[0]}=0" for setting in mixed)
    read = read_target_kinds(run.config["loss"])
    if read and not _SOFT & {*read}:
        reason = f"the loss reads {' or '.join(read)}, and a mixed image is of two of them"
        loss = run.choices.get("loss", "…")
        yield ConfigError(f"{' '.join(mixed)} loss={loss}", reason, f"loss=cross_entropy or loss=bce, or {off}")
    if not has_ranks:
        return
    try:
        size = run.accumulation.micro_batch_size
    except ConfigError:
        return  # which is reported
    if size % 2:
        unit = 2 * run.num_data_ranks
        fitting = -(-run.global_batch_size // unit) * unit
        batch = "" if fitting == run.global_batch_size else f"global_batch_size={fitting} "
        setting = f"micro_batch_size={size}" if run.micro_batch_size else f"global_batch_size={run.global_batch_size}"
        reason = f"a micro-batch of {size} leaves an image without the partner that it is mixed with"
        yield ConfigError(f"{setting} {' '.join(mixed)}", reason, f"{batch}micro_batch_size=2, or {off}")


def _name_mixing(transform: object) -> list[str]:
    """Return the settings by which images are mixed; empty: none is."""
    if not isinstance(transform, Mapping):
        return []
    node: Mapping[str, Any] = transform
    if not node.get("mix_probability", 1):
        return []
    return [f"transform.{name}={to_setting(node[name])}" for name in ("mixup", "cutmix") if node.get(name)]
