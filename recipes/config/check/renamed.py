"""Answer an old name of a setting or an option with the new one and the same value.

Nothing has been renamed since version 0.1.0. A rename gets a line here and one in CHANGELOG.md.
"""

from collections.abc import Mapping, Sequence

from recipes.config.overrides import for_shell
from recipes.errors import ConfigError

# old name -> new name: of a setting, `data.a` -> `data.b`, or of an option, `mode=a` -> `mode=b`
RENAMED: dict[str, str] = {}


def answer_renamed(override: str) -> ConfigError | None:
    """Return the error for an override, of one run or of a sweep, with an old name; None for any other."""
    marks = override[: len(override) - len(override.lstrip("+~"))]
    key, equals, value = override.removeprefix(marks).partition("=")
    if key in RENAMED:
        new = RENAMED[key]
        fix = f"'~{new}'" if marks == "~" else f"{new}={value if equals else '<value>'}"
        return ConfigError(override, f"`{key}` is now `{new}`", fix)
    options = [f"{key}={option}" for option in value.split(",")]
    old = next((option for option in options if option in RENAMED), None)
    if old is None:
        return None
    now = ",".join(RENAMED.get(option, option).partition("=")[2] for option in options)
    return ConfigError(override, f"`{old}` is now `{RENAMED[old]}`", f"{key}={now}")


def restore_sweeps(mistakes: Sequence[ConfigError], typed: Mapping[str, str]) -> list[ConfigError]:
    """Return the errors of a sweep's first job, with all values of the sweep for a key that is another one.

    Args:
        mistakes: Errors found for the first job.
        typed: Sweep override by override of the first job.
    """
    restored: list[ConfigError] = []
    for mistake in mistakes:
        whole = typed.get(mistake.setting, "")
        key, equals, value = mistake.fix.rpartition("=")
        if whole and equals and " " not in key and mistake.setting.endswith(f"={value}"):
            fix = for_shell(f"{key}={whole.partition('=')[2]}")
            mistake = ConfigError(whole, mistake.reason, fix)
        restored.append(answer_renamed(whole) or mistake)
    return restored
