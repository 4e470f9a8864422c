"""Write values as overrides, `key=value`, that Hydra reads back exactly; about 1 ms each."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from recipes.errors import ConfigError


def to_overrides(params: Mapping[str, Any] | None) -> list[str]:
    """Write `hydra.sweeper.params` as overrides; text is taken as it would be typed."""
    return [
        f"{key}={value if isinstance(value, str) else to_grammar(to_plain(key, value))}"
        for key, value in (params or {}).items()
    ]


def make_override(key: str, value: object) -> str:
    """Write a `key=value` that Hydra reads as exactly this value.

    Args:
        key: As typed, with its `+` if it has one.
        value: Number, text, None, or lists and dicts of them; NumPy scalars become Python's.

    Raises:
        ConfigError: Hydra's grammar cannot express it.
    """
    exact = to_plain(key, value)
    override = f"{key}={to_grammar(exact)}"
    if not _reads_as(override, exact):
        raise ConfigError(f"{key}={value!r}", "Hydra's grammar cannot express it", f"{key}=<another value>")
    return override


def to_grammar(value: object) -> str:
    """Write a plain value in Hydra's grammar; text that would be read as something else is quoted."""
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
    """Convert a value to Python's own types.

    Args:
        key: Key of the override, to name it in the message.
        value: Number, text, None, or lists and dicts of them.

    Raises:
        ConfigError: An override cannot hold it.
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
    raise ConfigError(f"{key}={value}", "only plain values can be swept over", f"{key}=choice(<values>)")


def _quoted(text: str) -> str:
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _reads_as(override: str, value: object) -> bool:
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    # compare what they print: 1, 1.0 and True are equal
    return not parsed.is_sweep_override() and repr(parsed.value()) == repr(value)
