"""Parse overrides, and write values as `key=value` overrides that Hydra reads back exactly; about 1 ms each."""

import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from recipes.errors import ConfigError

NAME_RULE = "a name in a setting has the letters a to z, digits, _ and -"
# a value that is nothing but that of another key, `${key}`
REFERENCE = re.compile(r"\$\{(?:([\w.]+)|oc\.select:\s*([\w.]+)\s*(?:,[^{}]*)?)\}")
_REFERENCE = re.compile(r"(\\*)\$\{")
_SPECIAL = re.compile(r"[\s()\[\]{}*?$&;|<>'\"\\#~]")  # to a shell
TYPOGRAPHIC_QUOTES = "“”„‟‘’‚‛«»"  # of text processors and chats; a shell reads them as text  # noqa: RUF001
_SETTING = re.compile(r"(\+{0,2})([\w./@-]*[\w]+)=(.*)", re.DOTALL)  # no deletion, and no flag
# sections and settings that determine how and where jobs run, not what they compute
_LAUNCH_SECTIONS = ("launcher", "hydra", "ignore_slurm")
_SWEEP_SETTINGS = (
    "sweep.objective",
    "sweep.direction",
    "sweep.retry_failed",
    "sweep.skip_invalid",
    "sweep.compare",
    "sweep.dashboard",
)
# a sweep's function, of which a parenthesis is missing
_FUNCTION = re.compile(r"(range|interval|choice|tag|glob|sort|shuffle)\(")
_INVISIBLE = ("Cf", "Zs", "Cc")  # categories of Unicode: zero-width and control characters, and spaces
_ESCAPED = re.compile(r"((?:\\\\)*)\\\$\{")  # an odd number of backslashes before it
# a quoted value, of which the quote that ends it is followed by what ends a value; an apostrophe is not
_QUOTED = re.compile(r"""(['"])(?:\\.|(?!\1).|\1(?!\s*(?:[,\]}]|$)))*\1(?=\s*(?:[,\]}]|$))""", re.DOTALL)


def parse_override(override: str) -> Override:
    """Parse a `key=value` with Hydra's grammar.

    Raises:
        hydra.errors.HydraException: The grammar cannot read it.
    """
    parsed: Override = OverridesParser.create().parse_override(override)
    return parsed


def quote(text: str) -> str:
    """Quote text so that Hydra's grammar reads it literally."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def parse_or_quote(typed: str, *, sweeps: bool = False) -> tuple[Override | None, str]:
    """Parse an override; what Hydra's grammar cannot read of its value, `mode.prompt=f(x` or `tags=[é]`, is quoted.

    Args:
        typed: The override.
        sweeps: Whether commas outside of lists separate the values of a sweep, and are not part of a text.

    Returns:
        The override, None if it is not `key=value`; and its text, quoted where needed.
    """
    key, equals, value = typed.partition("=")
    parts = split_values(value)
    is_of_parts = sweeps or all(map(_has_parts, parts))
    quoted = [f"{key}={','.join(map(_quote_unreadable, parts))}"] if is_of_parts else []
    if sweeps and (found := _FUNCTION.match(value)) and value.endswith(")"):  # choice(é,b)
        inner = split_values(value[found.end() : -1])
        quoted = [f"{key}={found[0]}{','.join(map(_quote_unreadable, inner))})"]
    texts = [typed, *quoted, f"{key}={quote(value)}"]
    for text in texts if equals else (typed,):
        try:
            parsed = parse_override(text)
        except HydraException:
            continue
        return (parsed if parsed.key_or_group else None), text
    return None, typed


def drop_replaced(words: Sequence[str]) -> list[str]:
    """Drop the overrides that a later one of the same key replaces: the last value counts, as in Hydra.

    Sections, `optimizer={lr: 1e-3}`, are merged with what is there, so they replace nothing. A `+` of an earlier
    override, without which the later one would have no key, moves to the later one.
    """
    newest: dict[str, tuple[int, str]] = {}  # key -> its last override, and the place of that
    kept: dict[int, str] = {}
    for place, word in enumerate(words):
        found = _SETTING.fullmatch(word)
        if found is None:
            kept[place] = word
            continue
        marks, key, value = found.groups()
        if key in newest and not value.lstrip().startswith("{"):
            earlier, its_marks = newest[key]
            del kept[earlier]
            marks = max(marks, its_marks, key=len)
        newest[key] = place, marks
        kept[place] = f"{marks}{key}={value}"
    return [kept[place] for place in sorted(kept)]


def split_values(text: str) -> list[str]:
    """Split text at its commas, except those in quotes, in lists and in sections; without what closes one, at all."""
    parts, start, place, depth = [], 0, 0, 0
    while place < len(text):
        begins = not text[start:place].strip() or text[:place].rstrip()[-1:] in ("[", "{", ",", ":")
        if begins and (quoted := _QUOTED.match(text, place)):
            place = quoted.end()
            continue
        character = text[place]
        if character == "\\":
            place += 1  # what it escapes separates nothing
        elif character in "[{" and (begins or depth):
            depth += 1
        elif character in "]}" and depth:
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
        place += 1
    return [part.strip() for part in text.split(",")] if depth else [*parts, text[start:].strip()]


def _has_parts(value: str) -> bool:
    return (value[:1], value[-1:]) in (("[", "]"), ("{", "}"))


def _quote_unreadable(value: str) -> str:
    """Quote what Hydra's grammar cannot read of a value, entry by entry: `[~/runs,é]`, `{note: é}`."""
    if _is_readable(f"x={value}"):
        return value
    if not _has_parts(value):
        return quote(value)
    entries = split_values(value[1:-1])
    if value[0] == "[":
        return f"[{','.join(map(_quote_unreadable, entries))}]"
    pairs = [entry.partition(":") for entry in entries]
    return f"{{{','.join(f'{key}:{_quote_unreadable(child.strip())}' for key, _, child in pairs)}}}"


def _is_readable(override: str) -> bool:
    try:
        parse_override(override)
    except HydraException:
        return False
    return True


def for_shell(override: str) -> str:
    """Quote an override for a shell if necessary."""
    return shlex.quote(override) if _SPECIAL.search(override) else override


def is_about_sweep(override: str) -> bool:
    """Return whether an override says how or where jobs run, in which those of a sweep cannot differ."""
    key = override.lstrip("+~").partition("=")[0].partition("@")[0]
    section = key.partition(".")[0].partition("/")[0]
    return section in _LAUNCH_SECTIONS or key.startswith(_SWEEP_SETTINGS)


def count_unclosed(value: str) -> int:
    """Return how many closing parentheses a function of a sweep lacks: 1 for `range(1,3`, 0 for any other text."""
    return max(value.count("(") - value.count(")"), 0) if _FUNCTION.match(value) else 0


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
        return value if _reads_as(f"x={value}", value) else quote(value)
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
        ConfigError: An override cannot represent it.
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


def escape_interpolations(value: Any) -> Any:
    """Escape every `${` in plain values of a resolved config, so that OmegaConf reads it as text."""
    if isinstance(value, str):
        # the backslashes before a `${` are halved when it is read, and one more makes it text
        return _REFERENCE.sub(r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: escape_interpolations(child) for key, child in value.items()}
    return [escape_interpolations(child) for child in value] if isinstance(value, list) else value


def unescape_interpolations(value: Any) -> Any:
    """Undo `escape_interpolations`; an unescaped `${` is left unchanged."""
    if isinstance(value, str):
        return _ESCAPED.sub(lambda found: found[1][: len(found[1]) // 2] + "${", value)
    if isinstance(value, Mapping):
        return {key: unescape_interpolations(child) for key, child in value.items()}
    return [unescape_interpolations(child) for child in value] if isinstance(value, list) else value


def _reads_as(override: str, value: object) -> bool:
    try:
        parsed = parse_override(override)
    except HydraException:
        return False
    # compare what they print: 1, 1.0 and True are equal
    return not parsed.is_sweep_override() and repr(parsed.value()) == repr(value)


def to_ascii(names: str) -> str:
    """Return names of settings in ASCII, which Hydra parses; `<name>` in place of one that has no Latin letters."""

    def spell(found: re.Match[str]) -> str:
        visible = "".join(text for text in found[0] if unicodedata.category(text) not in _INVISIBLE)
        latin = unicodedata.normalize("NFKD", visible).encode("ascii", "ignore").decode()
        return latin or ("<name>" if visible else "")

    return re.sub(r"[^\x00-\x7f]+", spell, names)
