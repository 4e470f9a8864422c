"""Inputs and outputs of a check. Does not import torch: the process that starts the checks does not need it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Accelerator = Literal["gpu", "cpu"]
Verdict = Literal["pass", "fail", "skipped"]

_CPU_PATIENCE = 6.0  # a CPU may be shared, and no speeds are measured on it


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where to run, and at what size.

    Attributes:
        accelerator: Value of `trainer.accelerator`.
        is_tiny: Take seconds instead of minutes: models are tiny, and speeds are reported but not judged.
        num_gpus: Number of GPUs visible to torch.
        memory_gib: Memory of one GPU; None on a CPU.
        folder: Folder for all files that the check writes.
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
        """Scale a time limit for a GPU to this accelerator."""
        return seconds * (_CPU_PATIENCE if self.accelerator == "cpu" else 1.0)


class Skip(Exception):  # noqa: N818  not an error
    """The machine lacks what a check needs; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a check.

    Attributes:
        verdict: Whether the requirement holds; `skipped` if unknown.
        headline: Main figures, in a few words for a table.
        note: Why the check failed or was skipped; otherwise any remarks.
        figures: All measurements.
        seconds: Duration, including imports.
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
        """Parse the output of `to_json`."""
        return cls(**json.loads(text))


def judge(failures: Sequence[str], *, headline: str, figures: dict[str, Any], note: str = "") -> Outcome:
    """Return an outcome that passes if there are no failures.

    Args:
        failures: One sentence, including the figures, for each requirement that does not hold.
        headline: Main figures for the table.
        figures: All measurements.
        note: Remarks for a passed check.
    """
    verdict: Verdict = "fail" if failures else "pass"
    return Outcome(verdict=verdict, headline=headline, note="; ".join(failures) or note, figures=figures)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named check.

    Attributes:
        name: Name, as in `--only`.
        passes_if: The requirement, for the table.
        function: `module:function` in this package, imported by the process that runs it.
        arguments: Keyword arguments of the function in addition to `settings`.
        limit_seconds: Time after which the check is killed and fails.
    """

    name: str
    passes_if: str
    function: str
    limit_seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)
