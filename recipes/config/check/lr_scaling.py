"""Check a learning rate that is scaled with the batch size: its reference point, and that nothing else sets it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.errors import ConfigError
from recipes.lr_scaling import POWERS, is_positive, scaled_lr

_REFERENCE = {"base_lr": "learning rate", "base_batch_size": "batch size"}


def check_lr_scaling(
    config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[ConfigError]:
    """Check the rule, its reference point and the resulting learning rate.

    Args:
        config: Plain values with all interpolations resolved.
        choices: Option chosen for each group; lacks `lr_scaling` if the base is a frozen config.
        overrides: Command-line overrides.
    """
    section = config.get("lr_scaling")
    if not isinstance(section, dict) or not {"rule", *_REFERENCE} <= section.keys():
        return  # frozen config of an old run, or already reported by the check of sections
    if section["rule"] == "none":
        yield from _find_unused(overrides)
        return
    if section["rule"] not in POWERS:
        yield ConfigError(
            f"lr_scaling.rule={section['rule']}",
            f"the rules are {' '.join(POWERS)}",
            "lr_scaling=linear or lr_scaling=sqrt",
        )
        return
    wrong = list(_check_reference(section))
    yield from wrong
    if not wrong:
        yield from _check_result(config, section, is_frozen="lr_scaling" not in choices)


def _find_unused(overrides: Sequence[str]) -> Iterator[ConfigError]:
    typed = [override.lstrip("+").partition("=")[0] for override in overrides]
    for override in overrides:
        if override.lstrip("+").startswith(tuple(f"lr_scaling.{key}=" for key in _REFERENCE)):
            missing = [key for key in _REFERENCE if f"lr_scaling.{key}" not in typed]
            others = [f"lr_scaling.{key}=<the {_REFERENCE[key]} that it was tuned for>" for key in missing]
            fix = " ".join(["lr_scaling=sqrt", override, *others])
            yield ConfigError(override, "no rule uses it with lr_scaling=none", fix)


def _check_reference(section: Mapping[str, Any]) -> Iterator[ConfigError]:
    for key, what in _REFERENCE.items():
        value = section[key]
        if value is None:
            yield ConfigError(
                f"no lr_scaling.{key}",
                f"lr_scaling={section['rule']} starts from a known good {what}",
                f"lr_scaling.{key}=<above 0>",
            )
        elif not is_positive(value):
            yield ConfigError(
                f"lr_scaling.{key}={value}",
                f"the {what} must be a positive number",
                f"lr_scaling.{key}=<above 0>",
            )


def _check_result(config: Mapping[str, Any], section: Mapping[str, Any], *, is_frozen: bool) -> Iterator[ConfigError]:
    """Reject a learning rate set by hand, which would silently disable the rule."""
    rule, batch_size = section["rule"], config.get("global_batch_size")
    optimizer = config.get("optimizer")
    lr = optimizer["lr"] if isinstance(optimizer, dict) and "lr" in optimizer else None
    expected = scaled_lr(rule, section["base_lr"], section["base_batch_size"], batch_size)
    if expected is None or (is_positive(lr) and math.isclose(lr, expected, rel_tol=1e-6)):
        return
    if is_frozen:  # its learning rate is a plain value, which no longer follows the rule
        fix = f"optimizer.lr={expected!r}, or lr_scaling.rule=none to set it yourself"
    else:
        fix = "the same command without optimizer.lr, or lr_scaling=none to set it yourself"
    yield ConfigError(
        f"optimizer.lr={lr}",
        f"lr_scaling={rule} makes it {expected:.6g} at global_batch_size={batch_size}",
        fix,
    )
