"""Parse sweep overrides, `optimizer.lr=tag(log,interval(1e-4,1e-2))`, into parameters to sample. About 1 ms each."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
    Sweep,
)
from hydra.errors import HydraException

from recipes.config.overrides import for_shell, make_override, to_plain
from recipes.errors import ConfigError

_LINEAR = ("linear", "lin", "uniform", "normal")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several values, in the order they were typed: a sampler must see the same order after a restart.

    Attributes:
        options: The values as text: `f"{key}={option}"` is an override.
        values: The values as plain Python objects.
    """

    options: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number between two bounds, both included.

    Attributes:
        low: The lower bound.
        high: The upper bound; of a `range` the last value that it reaches.
        log: Whether to sample on a log scale.
        is_integer: Whether the values are integers.
        step: Distance between values, counted from `low`; None for an `interval`, which cannot be enumerated.
    """

    low: int | float
    high: int | float
    log: bool = False
    is_integer: bool = False
    step: int | float | None = None

    def values(self) -> list[int | float]:
        """Return all values; only an interval with a step has a finite number of them."""
        assert self.step is not None, f"{self} cannot be enumerated"
        if self.is_integer:
            return list(range(int(self.low), int(self.high) + 1, int(self.step)))
        low, step = Decimal(self.low), Decimal(self.step)
        count = round((Decimal(self.high) - low) / step) + 1
        return [float(low + number * step) for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Swept parameters of a sweep, and the overrides that all runs share.

    Attributes:
        parameters: The swept parameters by key, with its `+` if one was typed.
        fixed: The overrides of every run.
    """

    parameters: dict[str, Choice | Interval]
    fixed: list[str]


def read_space(
    overrides: Sequence[str], *, config_loader: ConfigLoader | None = None
) -> tuple[SearchSpace, list[ConfigError]]:
    """Parse the overrides of a sweep.

    Args:
        overrides: Hydra's overrides, swept or not; a later one replaces an earlier one of the same key.
        config_loader: Lists the options of a config group; needed for `glob`.

    Returns:
        The space of the valid overrides, and an error for each invalid one.
    """
    parser = OverridesParser.create()
    newest: dict[tuple[bool, str, str | None], tuple[str, Override]] = {}
    mistakes = []
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
        except HydraException as error:
            reason = next(line for line in reversed(str(error).splitlines()) if line.strip())
            fix = f"{text.partition('=')[0]}=<values>"
            mistakes.append(ConfigError(text, reason.strip(), fix))
            continue
        parsed.config_loader = config_loader
        # whether the key is added or changed does not matter: `+key=` and `key=` are one key
        identity = (parsed.is_delete(), parsed.key_or_group, parsed.package)
        newest.pop(identity, None)  # so that the order is that of the last occurrence
        newest[identity] = text, parsed
    space = SearchSpace(parameters={}, fixed=[])
    for text, parsed in newest.values():
        try:
            if parsed.is_sweep_override():
                space.parameters[parsed.get_key_element()] = _parameter(text, parsed)
            elif parsed.is_delete():
                space.fixed.append(text)
            else:  # the parsed value: `shuffle([1,2])` must be one order for all runs
                space.fixed.append(make_override(parsed.get_key_element(), parsed.value()))
        except ConfigError as mistake:
            mistakes.append(mistake)
    return space, mistakes


def _parameter(text: str, parsed: Override) -> Choice | Interval:
    sweep, key = parsed.value(), parsed.get_key_element()
    tags = sweep.tags if isinstance(sweep, Sweep) else set()
    if unknown := tags - {"log"}:
        tag = re.escape(min(unknown))
        if min(unknown).lower() in _LINEAR:
            plain = re.sub(rf"=tag\(\s*{tag}\s*,\s*(.*)\)$", r"=\1", text)
            raise ConfigError(text, "without a tag a scale is linear: the only tag is log", for_shell(plain))
        fix = for_shell(re.sub(rf"\b{tag}\b", "log", text))
        raise ConfigError(text, f"there is no tag {min(unknown)!r}: the only one is log", fix)
    if isinstance(sweep, ChoiceSweep | Glob):
        return _choice(text, parsed, is_log=bool(tags))
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None, "Hydra's interval has a start"
        assert sweep.end is not None, "Hydra's interval has an end"
        is_integer = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        interval = Interval(low=sweep.start, high=sweep.end, log=bool(tags), is_integer=is_integer)
    else:
        assert isinstance(sweep, RangeSweep), f"a sweep of kind {parsed.value_type}"
        interval = _range(text, key, sweep, is_log=bool(tags))
    _check(text, key, interval)
    return interval


def _choice(text: str, parsed: Override, *, is_log: bool) -> Choice:
    key, sweep = parsed.get_key_element(), parsed.value()
    if is_log:
        fix = f"'{key}=tag(log,interval(<low>,<high>))', or the values without the tag"
        raise ConfigError(text, "a list of values has no scale", fix)
    if isinstance(sweep, ChoiceSweep):
        # not sweep_iterator, which shuffles at every call
        values = [Override._convert_value(value) for value in sweep.list]
    elif parsed.config_loader is None:
        raise ConfigError(text, "the options of the group are not known here", f"{key}=<options>")
    else:
        values = list(parsed.sweep_iterator())
    values = [to_plain(key, value) for value in values]
    if not values:
        raise ConfigError(text, "no option matches", f"{key}=<options>")
    options = [make_override(key, value).removeprefix(f"{key}=") for value in values]
    if repeated := [option for option in options if options.count(option) > 1]:
        unique = ",".join(dict.fromkeys(options))
        raise ConfigError(text, f"{repeated[0]} is listed twice", f"{key}={unique}")
    return Choice(options=tuple(options), values=tuple(values))


def _range(text: str, key: str, sweep: RangeSweep, *, is_log: bool) -> Interval:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None, "Hydra's range has a start"
    assert stop is not None, "Hydra's range has an end"
    if step == 0 or not all(map(math.isfinite, (start, stop, step))):
        raise ConfigError(text, "the range never ends", f"'{key}=range(<low>,<high>,<step>)'")
    is_integer = all(isinstance(number, int) for number in (start, stop, step))
    first, width = Decimal(start), Decimal(step)  # exact: no rounding error over many steps
    count = math.ceil((Decimal(stop) - first) / width)
    if count < 1:
        raise ConfigError(text, "the sweep has no values", f"'{key}=range(<low>,<high>)'")
    if is_log and (step != 1 or not is_integer):
        fix = f"'{key}=tag(log,interval(<low>,<high>))'"
        raise ConfigError(text, "its steps are not equal ratios", fix)
    low, high = sorted((first, first + (count - 1) * width))
    number = int if is_integer else float
    return Interval(low=number(low), high=number(high), log=is_log, is_integer=is_integer, step=abs(step))


def _check(text: str, key: str, interval: Interval) -> None:
    low, high = interval.low, interval.high
    fix = f"'{key}=interval(<low>,<high>)'"
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(text, "both ends must be finite", fix)
    if low > high:
        other_way = f"interval({high},{low})"
        fix = f"'{key}=tag(log,{other_way})'" if interval.log else f"'{key}={other_way}'"
        raise ConfigError(text, f"its lower end, {low}, is above its upper end, {high}", fix)
    if interval.log and low <= 0:
        fix = f"'{key}=tag(log,interval(<above 0>,{high}))'"
        raise ConfigError(text, f"{low:g} has no logarithm", fix)
