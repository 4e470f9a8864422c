"""What a check is given and what it returns. Imports no torch: the process that starts the checks needs none."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Accelerator = Literal["gpu", "cpu"]
Verdict = Literal["pass", "fail", "skipped"]

_CPU_PATIENCE = 6.0  # a CPU may be shared, and nothing is measured on it


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where and how large to run.

    Attributes:
        accelerator: What `trainer.accelerator` is set to.
        is_tiny: Seconds in all instead of minutes: tiny models, and speeds are reported but not judged.
        num_gpus: That torch sees.
        memory_gib: Of one GPU; None on a CPU.
        folder: For everything that the check writes.
    """

    accelerator: Accelerator
    is_tiny: bool
    num_gpus: int
    memory_gib: float | None
    folder: Path

    @property
    def on_one_device(self) -> list[str]:
        """Overrides for one device of the accelerator."""
        return [f"trainer.accelerator={self.accelerator}", "trainer.devices=1"]

    def limit(self, seconds: float) -> float:
        """Return how long something may take here that may take so long on a GPU."""
        return seconds * (_CPU_PATIENCE if self.accelerator == "cpu" else 1.0)


class Skip(Exception):  # noqa: N818  not an error
    """The machine lacks what a check needs; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended.

    Attributes:
        verdict: Whether what has to hold holds; `skipped`: not known.
        headline: The figures that matter, a few words for a table.
        note: Why it failed or was skipped; what is worth knowing otherwise.
        figures: Everything that was measured.
        seconds: That it took, imports included.
    """

    verdict: Verdict
    headline: str = ""
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> str:
        """Return the fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        """Return what `to_json` wrote."""
        return cls(**json.loads(text))


def judge(failures: Sequence[str], *, headline: str, figures: dict[str, Any], note: str = "") -> Outcome:
    """Return an outcome that passes if there are no failures.

    Args:
        failures: What does not hold, a sentence each with its numbers.
        headline: For the table.
        figures: Everything that was measured.
        note: What is worth knowing if it passes.
    """
    verdict: Verdict = "fail" if failures else "pass"
    return Outcome(verdict=verdict, headline=headline, note="; ".join(failures) or note, figures=figures)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check by name.

    Attributes:
        name: As in `--only`.
        passes_if: What has to hold, for the table.
        function: `module:function` in this package, imported by the process that runs it.
        arguments: Keyword arguments of the function besides `settings`.
        limit_seconds: After which it is ended and has failed.
    """

    name: str
    passes_if: str
    function: str
    limit_seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)
