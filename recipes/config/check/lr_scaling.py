"""A learning rate that follows the batch size: its reference point, and that nothing else sets the rate beside it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.errors import ConfigError
from recipes.lr_scaling import POWERS, is_positive, scaled_lr

_WHAT = {"base_lr": "learning rate", "base_batch_size": "batch size"}


def check_lr_scaling(
    config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[ConfigError]:
    """The rule, its two numbers, and the learning rate that the optimizer has in the end.

    Args:
        config: Plain values, every interpolation resolved.
        choices: The option of each group; that of `lr_scaling` is missing where a run's frozen config is the base.
        overrides: What was typed.
    """
    section = config.get("lr_scaling")
    if not isinstance(section, dict) or not {"rule", *_WHAT} <= section.keys():
        return  # the frozen config of a run from before there was one, or a mistake of the words
    if section["rule"] == "none":
        yield from _unused(overrides)
        return
    if section["rule"] not in POWERS:
        yield ConfigError(
            f"lr_scaling.rule={section['rule']}",
            f"the rules are {' '.join(POWERS)}",
            "lr_scaling=linear or lr_scaling=sqrt",
        )
        return
    wrong = list(_reference(section))
    yield from wrong
    if not wrong:
        yield from _set_otherwise(config, section, is_frozen="lr_scaling" not in choices)


def _unused(overrides: Sequence[str]) -> Iterator[ConfigError]:
    for override in overrides:
        if override.lstrip("+").startswith(tuple(f"lr_scaling.{key}=" for key in _WHAT)):
            yield ConfigError(
                override, "no rule uses it: lr_scaling=none", f"lr_scaling=sqrt {override}"
            )


def _reference(section: Mapping[str, Any]) -> Iterator[ConfigError]:
    for key, what in _WHAT.items():
        value = section[key]
        if value is None:
            yield ConfigError(
                f"no lr_scaling.{key}",
                f"lr_scaling={section['rule']} starts from a {what} that is known to be good",
                f"lr_scaling.{key}=<above 0>",
            )
        elif not is_positive(value):
            yield ConfigError(
                f"lr_scaling.{key}={value}",
                f"a {what} is a number above 0",
                f"lr_scaling.{key}=<above 0>",
            )


def _set_otherwise(
    config: Mapping[str, Any], section: Mapping[str, Any], *, is_frozen: bool
) -> Iterator[ConfigError]:
    """A learning rate set by hand beside the rule would switch the rule off without a word."""
    rule, batch_size = section["rule"], config.get("global_batch_size")
    optimizer = config.get("optimizer")
    lr = optimizer["lr"] if isinstance(optimizer, dict) and "lr" in optimizer else None
    wanted = scaled_lr(rule, section["base_lr"], section["base_batch_size"], batch_size)
    if wanted is None or (is_positive(lr) and math.isclose(lr, wanted, rel_tol=1e-6)):
        return
    if is_frozen:  # a number by now, which follows nothing
        fix = f"optimizer.lr={wanted!r}, or lr_scaling.rule=none for your own"
    else:
        fix = "nothing for optimizer.lr, or lr_scaling=none for your own"
    yield ConfigError(
        f"optimizer.lr={lr}",
        f"lr_scaling={rule} makes it {wanted:.6g} at global_batch_size={batch_size}",
        fix,
    )
