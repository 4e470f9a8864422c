"""Describe a command for the page that its mode writes."""

import time
from typing import Any

from recipes.config.commands import start_program
from recipes.config.resolved import ResolvedRun
from recipes.runtime.environment import describe_environment

_NAMED = ("recipe", "model", "data")


def describe_command(resolved: ResolvedRun) -> dict[str, Any]:
    """Return name, time, devices, host, program and overrides of a command: what distinguishes two pages."""
    environment = describe_environment(resolved.overrides)
    chosen = [resolved.name, *(resolved.choices.get(group, "") for group in _NAMED)]
    return {
        "name": ", ".join(dict.fromkeys(filter(None, chosen))),
        "time": time.time(),
        "program": start_program(resolved.overrides),
        **{key: environment[key] for key in ("devices", "hostname", "overrides")},
    }
