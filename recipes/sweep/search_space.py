"""The words of a sweep, `optimizer.lr=tag(log,interval(1e-4,1e-2))`, as parameters to sample. About 1 ms a word."""

import math
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

from recipes.config.overrides import make_override, to_plain
from recipes.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several values, in the order they were typed: `shuffle` changes nothing that a sampler sees.

    Attributes:
        options: As words: `f"{key}={option}"` is an override.
        values: The same as plain Python values.
    """

    options: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number between two, both included.

    Attributes:
        low: The least.
        high: The greatest; of a `range` the last that it reaches.
        log: Whether equal ratios are equally likely.
        is_integer: Whether it is a whole number.
        step: Between neighbours, from `low` on; None: of an `interval`, which cannot be enumerated.
    """

    low: int | float
    high: int | float
    log: bool = False
    is_integer: bool = False
    step: int | float | None = None

    def values(self) -> list[int | float]:
        """All that it can be; only where there is a step."""
        assert self.step is not None, f"{self} cannot be enumerated"
        if self.is_integer:
            return list(range(int(self.low), int(self.high) + 1, int(self.step)))
        low, step = Decimal(self.low), Decimal(self.step)
        count = round((Decimal(self.high) - low) / step) + 1
        return [float(low + number * step) for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What differs between the runs of a sweep, and what does not.

    Attributes:
        parameters: By key, with the `+` that it was typed with.
        fixed: Overrides that every run is given.
    """

    parameters: dict[str, Choice | Interval]
    fixed: list[str]


def read_space(
    words: Sequence[str], *, config_loader: ConfigLoader | None = None
) -> tuple[SearchSpace, list[ConfigError]]:
    """Read the words of a sweep: of the config first, then those that were typed, which replace them.

    Args:
        words: Hydra's overrides, sweeps among them.
        config_loader: Knows the options of a group, which `glob` needs.

    Returns:
        The space without the words that cannot be, and a mistake for each of these.
    """
    parser = OverridesParser.create()
    newest: dict[tuple[bool, str, str | None], tuple[str, Override]] = {}
    mistakes = []
    for word in words:
        try:
            typed = parser.parse_override(word)
        except HydraException as error:
            why = next(line for line in reversed(str(error).splitlines()) if line.strip())
            mistakes.append(ConfigError(word, why.strip(), f"{word.partition('=')[0]}=<values>"))
            continue
        typed.config_loader = config_loader
        # a key is added, changed or deleted, whatever an earlier word has done with it
        identity = (typed.is_delete(), typed.key_or_group, typed.package)
        newest.pop(identity, None)
        newest[identity] = word, typed
    space = SearchSpace(parameters={}, fixed=[])
    for word, typed in newest.values():
        try:
            if typed.is_sweep_override():
                space.parameters[typed.get_key_element()] = _parameter(word, typed)
            elif typed.is_delete():
                space.fixed.append(word)
            else:  # as it was read: `shuffle([1,2])` is one order for all runs
                space.fixed.append(make_override(typed.get_key_element(), typed.value()))
        except ConfigError as mistake:
            mistakes.append(mistake)
    return space, mistakes


def _parameter(word: str, typed: Override) -> Choice | Interval:
    sweep, key = typed.value(), typed.get_key_element()
    tags = sweep.tags if isinstance(sweep, Sweep) else set()
    if unknown := tags - {"log"}:
        raise ConfigError(
            word, f"the tag {min(unknown)!r} means nothing here", "tag(log,<a sweep>)"
        )
    if isinstance(sweep, ChoiceSweep | Glob):
        return _choice(word, typed, is_log=bool(tags))
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None, "Hydra's interval has a start"
        assert sweep.end is not None, "Hydra's interval has an end"
        is_integer = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        found = Interval(low=sweep.start, high=sweep.end, log=bool(tags), is_integer=is_integer)
    else:
        assert isinstance(sweep, RangeSweep), f"a sweep of kind {typed.value_type}"
        found = _range(word, key, sweep, is_log=bool(tags))
    _check(word, key, found)
    return found


def _choice(word: str, typed: Override, *, is_log: bool) -> Choice:
    key = typed.get_key_element()
    listed = typed.value()
    if is_log:
        raise ConfigError(
            word, "single values have no scale", f"{key}=tag(log,interval(<low>,<high>)), or no tag"
        )
    if isinstance(listed, ChoiceSweep):
        # what sweep_iterator gives may be shuffled
        values = [Override._convert_value(value) for value in listed.list]
    elif typed.config_loader is None:
        raise ConfigError(word, "there are no options to choose from", f"{key}=<options>")
    else:
        values = list(typed.sweep_iterator())
    values = [to_plain(key, value) for value in values]
    if not values:
        raise ConfigError(word, "no option is of that name", f"{key}=<options>")
    words = [make_override(key, value) for value in values]
    options = [one.removeprefix(f"{key}=") for one in words]
    if twice := [option for option in options if options.count(option) > 1]:
        once = ",".join(dict.fromkeys(options))
        raise ConfigError(word, f"{twice[0]} is named twice", f"{key}={once}")
    return Choice(options=tuple(options), values=tuple(values))


def _range(word: str, key: str, sweep: RangeSweep, *, is_log: bool) -> Interval:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None, "Hydra's range has a start"
    assert stop is not None, "Hydra's range has an end"
    if step == 0 or not all(map(math.isfinite, (start, stop, step))):
        raise ConfigError(word, "it has no end", f"{key}=range(<low>,<high>,<step>)")
    is_integer = all(isinstance(number, int) for number in (start, stop, step))
    first, width = Decimal(start), Decimal(step)
    count = math.ceil((Decimal(stop) - first) / width)
    if count < 1:
        raise ConfigError(word, "it is empty", f"{key}=range(<low>,<high>)")
    if is_log and (step != 1 or not is_integer):
        raise ConfigError(
            word, "its steps are no equal ratios", f"{key}=tag(log,interval(<low>,<high>))"
        )
    low, high = sorted((first, first + (count - 1) * width))
    number = int if is_integer else float
    return Interval(
        low=number(low), high=number(high), log=is_log, is_integer=is_integer, step=abs(step)
    )


def _check(word: str, key: str, interval: Interval) -> None:
    low, high = interval.low, interval.high
    fix = f"{key}=interval(<low>,<high>)"
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(word, "its ends must be numbers", fix)
    if low > high:
        other_way = f"interval({high},{low})"
        fix = f"{key}=tag(log,{other_way})" if interval.log else f"{key}={other_way}"
        raise ConfigError(word, f"{low} is greater than {high}", fix)
    if interval.log and low <= 0:
        raise ConfigError(
            word, f"{low} has no logarithm", f"{key}=tag(log,interval(<above 0>,{high}))"
        )
