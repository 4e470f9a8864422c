"""Config errors in three clauses: what you set, why it cannot work, what to type. Imports only the standard library."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INSTALLED = "lightning-recipes"  # the console script; in a clone it is `python train.py`
PROJECT_VARIABLE = "RECIPES_PROJECT"  # the folder of code that the command adds to PYTHONPATH in a project
NOTEBOOK = "!{sys.executable} -m lightning_recipes"  # in a cell; after `import sys`
COMMAND_VARIABLE = "RECIPES_COMMAND"  # the command that has started this program, for its ranks and jobs

# C0 and C1 control characters except tab and newline, and bidirectional controls: a terminal interprets them; and
# surrogates, which no encoding has: Python puts them into the names of files that are not UTF-8
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_CONTROLS |= {*range(0xD800, 0xE000)}
# spaces that look like one, or like nothing: pasted from a page, they are the mistake that nobody sees
_CONTROLS |= {0xA0, 0xFEFF, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, *range(0x2060, 0x2065), 0x3000}
# a key of a data source, in an override as it was typed and in what to type; not the `data.` of a file name
_TYPED_KEY = re.compile(r"^data\.|(?<=\s)data\.(?=[\w.]+=)")
_KEY = re.compile(r"(?<![^\s'\"(@])data\.(?=[\w.-]+=)|(?<=without )data\.(?=[a-z_])")
_OPTION = re.compile(r"(?<![\w.@])data=(?=\w)")
# what neither Hydra's grammar nor a shell reads otherwise, and what of it is no text
_PLAIN = re.compile(r"[\w./-][\w./:@%+-]*", re.ASCII)
_DIGITS = r"(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[+-]?[\d_]+)?"
_OTHER_TYPE = re.compile(rf"[+-]?({_DIGITS}|inf|nan)|true|false|null", re.IGNORECASE)
_REFERENCE = re.compile(r"(\\*)\$\{")
_ESCAPES = {code: repr(chr(code))[1:-1] for code in sorted(_CONTROLS)}


class ConfigError(ValueError):
    """A wrong setting, in three clauses; all errors found are reported together.

    Attributes:
        setting: The override as set, `key=value`.
        reason: Why it cannot work.
        fix: What to type instead.
        late: First line of the report if it was found after a run may have started; None: nothing was built.
    """

    def __init__(self, setting: str, reason: str, fix: str) -> None:
        super().__init__(setting, reason, fix)
        self.setting = setting
        self.reason = reason
        self.fix = fix
        self.late: str | None = None

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason}; type {self.fix}"

    def in_section(self, section: str) -> "ConfigError":
        """Return the error of a data source, which speaks of `data.`, with the config section that it is in."""
        setting, fix = _TYPED_KEY.sub(f"{section}.", self.setting), _KEY.sub(f"{section}.", self.fix)
        return ConfigError(setting, self.reason, _OPTION.sub(f"+data@{section}=", fix))


def shell(command: str, *paths: object) -> str:
    """Return a command of the shell with paths, quoted where they need it."""
    return " ".join([command, *(shlex.quote(str(path)) for path in paths)])


def python(code: str, *arguments: object) -> str:
    """Return a command that runs Python code without double quotes, whose `sys.argv[1:]` are the arguments."""
    return shell(f'python -c "{code}"', *arguments)


def type_command(words: str) -> str:
    """Return the command that starts this program with these words, by the name that it has been started by.

    Args:
        words: Overrides and flags, quoted for a shell; `…` for any.
    """
    program = INSTALLED if _is_installed() else "python train.py"
    return f"{NOTEBOOK if in_notebook() else os.environ.get(COMMAND_VARIABLE, program)} {type_words(words)}"


def type_words(words: str) -> str:
    """Return words of a command as they are typed: in a notebook, a cell replaces {…}, and nothing if it cannot."""
    return words.replace("{", "{{").replace("}", "}}") if in_notebook() else words


def type_extra(name: str) -> str:
    """Return the command that installs an extra, beside what is installed or in the folder of a clone."""
    return f"pip install '{INSTALLED}[{name}]'" if _is_installed() else f"pip install -e '.[{name}]'"


def _is_installed() -> bool:
    """Return whether this is an installed package, not only a clone."""
    return os.environ.get(COMMAND_VARIABLE) == INSTALLED or (Path(__file__).parents[1] / "one_name.py").is_file()


def in_notebook() -> bool:
    """Return whether IPython runs this program, or the one that has started it as a rank."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None or os.environ.get(COMMAND_VARIABLE) == NOTEBOOK


def type_setting(key: str, value: object) -> str:
    """Return `key=value` as it is typed in a shell so that Hydra reads the value as it is, whatever it holds.

    The one way to print what a user, a file or a dataset named: a path, a field, a token, a split.

    Args:
        key: Setting.
        value: A text or a path; a mapping of names to texts, numbers or None, as `data.fields` takes it; a list of
            these.
    """
    return for_shell(f"{key}={_write_nested(value) if isinstance(value, Mapping | list) else _write(value)}")


def _write_nested(value: object) -> str:
    """Return a value inside of a list or a mapping in Hydra's grammar; only there is a number a number."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_write_nested(own)}' for name, own in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_write_nested, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) if isinstance(value, int | float) else _write(value)


def _write(value: object) -> str:
    """Return a text in Hydra's grammar: quoted if it would be read as something else."""
    text = str(value)
    if _PLAIN.fullmatch(text) and not _OTHER_TYPE.fullmatch(text):
        return text
    text = _REFERENCE.sub(r"\1\1\\${", text)  # a reference to another setting
    # backslashes count before a quotation mark alone, also before that which ends the text
    text = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def for_shell(text: str) -> str:
    """Quote a word for a shell where it needs it, with double quotes around single ones where those do nothing else."""
    quoted = shlex.quote(text)
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else quoted


class ConfigErrors(Exception):  # noqa: N818  a collection of ConfigError
    """Several wrong settings, found before anything was started.

    Args:
        mistakes: All errors found.
        head: First line of the report.
    """

    def __init__(self, mistakes: list[ConfigError], head: str) -> None:
        super().__init__(head)
        self.mistakes = mistakes
        self.head = head


def find_mistake(error: BaseException | None) -> ConfigError | None:
    """Return the first `ConfigError` in the `__cause__` chain, or None; Hydra wraps what a constructor raises."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def format_report(mistakes: Sequence[ConfigError], head: str | None = None) -> str:
    """Format all errors as a numbered list, three lines each.

    Args:
        mistakes: All errors found.
        head: First line; None: the number of errors in the config.
    """
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = [head or f"The config has {count}; nothing was built."]
    for number, mistake in enumerate(mistakes, start=1):
        # a line each, whatever the name of a file holds: a newline in it could fake the line of what to type
        setting, reason, fix = (text.replace("\n", "\\n") for text in (mistake.setting, mistake.reason, mistake.fix))
        lines += ["", f"{number}. {setting}", f"   {reason}", f"   type: {fix}"]
    return escape_controls("\n".join(lines))  # a config read from a folder may hold any character


def escape_controls(text: str) -> str:
    """Escape terminal controls, surrogates and invisible spaces, for example as `\\x1b`; tabs and newlines stay."""
    return text.translate(_ESCAPES)
