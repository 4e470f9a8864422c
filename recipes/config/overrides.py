"""Values as words that Hydra reads back exactly: `key=value`. About 1 ms a word."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from recipes.errors import ConfigError


def to_overrides(params: Mapping[str, Any] | None) -> list[str]:
    """`hydra.sweeper.params` as words; text stands there as it would be typed."""
    return [
        f"{key}={value if isinstance(value, str) else to_grammar(to_plain(key, value))}"
        for key, value in (params or {}).items()
    ]


def make_override(key: str, value: object) -> str:
    """`key=value` that Hydra reads as exactly this value.

    Args:
        key: As it would be typed, with its `+`.
        value: A number, text, None, or lists and dicts of them; NumPy's numbers count as Python's.

    Raises:
        ConfigError: Hydra's grammar cannot say it.
    """
    exact = to_plain(key, value)
    word = f"{key}={to_grammar(exact)}"
    if not _reads_as(word, exact):
        raise ConfigError(
            f"{key}={value!r}", "Hydra's grammar cannot say it", f"{key}=<another value>"
        )
    return word


def to_grammar(value: object) -> str:
    """A plain value in Hydra's grammar; text in quotes where it would be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if _reads_as(f"x={value}", value) else _quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(to_grammar, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{to_grammar(child)}' for key, child in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def to_plain(key: str, value: object) -> Any:
    """The value that `key` takes, made of Python's own types.

    Raises:
        ConfigError: It is none that a word can hold.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [to_plain(key, child) for child in value]
    if isinstance(value, Mapping):
        return {to_plain(key, name): to_plain(key, child) for name, child in value.items()}
    raise ConfigError(
        f"{key}={value}", "only a whole value can be swept over", f"{key}=choice(<values>)"
    )


def _quoted(text: str) -> str:
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _reads_as(word: str, value: object) -> bool:
    try:
        read = OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    # by what they print: 1, 1.0 and True are equal
    return not read.is_sweep_override() and repr(read.value()) == repr(value)
