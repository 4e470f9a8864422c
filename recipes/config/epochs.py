"""A length in passes over the training data, `trainer.max_steps=3epochs`, until the data is counted."""

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError, type_setting

MAX_STEPS = "trainer.max_steps"
# stands for the number of steps while the config is checked, and is longer than whatever must fit into it: what is too
# long for the true number is found once that is known
UNCOUNTED = 10**9
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*epochs?")
_FORMULA = re.compile(r"\$\{(?!oc\.select:)\w[\w.]*:.*trainer\.max_steps\b")  # ${steps_of:…}; not ${trainer.max_steps}
_LIGHTNING = re.compile(r"\+{0,2}trainer\.max_epochs=(\d+(?:\.\d+)?)")


def write_epochs(override: str) -> str:
    """Return Lightning's `trainer.max_epochs=3` as a number of passes in `trainer.max_steps`; others as they are."""
    return _LIGHTNING.sub(r"trainer.max_steps=\1epochs", override) if _LIGHTNING.fullmatch(override) else override


def take_epochs(config: DictConfig) -> str | None:
    """Replace a length in passes by a number of steps that stands for it, and return the passes as text, `3`.

    Args:
        config: Unresolved config, which is changed.

    Returns:
        None if the length is set in steps.

    Raises:
        ConfigError: There are no passes, or a setting is computed from their number of steps.
    """
    length = OmegaConf.select(config, MAX_STEPS, throw_on_missing=False)
    found = _EPOCHS.fullmatch(length.strip()) if isinstance(length, str) else None
    if found is None:
        return None
    typed = type_setting(MAX_STEPS, length)
    if not Fraction(found[1]):
        raise ConfigError(typed, "a run takes at least one step", f"{MAX_STEPS}=1epoch")
    for key, value in _list_values(OmegaConf.to_container(config)):
        if not key.startswith("hydra.") and _FORMULA.search(value):
            reason = f"{key}={value} is computed from it, before the data is counted"
            raise ConfigError(typed, reason, f"{MAX_STEPS}=<optimizer steps>, or {key}=<a number>")
    OmegaConf.update(config, MAX_STEPS, UNCOUNTED)
    return found[1]


def read_epochs(interval: str) -> int | None:
    """Return the epochs of an interval such as `2epochs`; None if it is none of whole epochs."""
    found = re.fullmatch(r"\+?0*([1-9]\d*)\s*epochs?", interval.strip())
    return None if found is None else int(found[1])


def count_steps(epochs: str, *, num_samples: int, global_batch_size: int) -> int:
    """Return the optimizer steps in which every sample is trained on at least this often; the last may go on.

    >>> count_steps("3", num_samples=100, global_batch_size=32)
    10
    """
    return math.ceil(Fraction(epochs) * num_samples / global_batch_size)


def _list_values(section: Any, path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _list_values(value, f"{path}{name}.")
        elif isinstance(value, str):
            yield f"{path}{name}", value
