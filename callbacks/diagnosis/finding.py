"""Data classes for findings: measured evidence, its meaning, and possible causes with ways to test them."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .curve import Block, Curve
from .run import Run

Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")


@dataclass(frozen=True)
class Evidence:
    """One value measured in a run.

    Attributes:
        what: Description, such as `lowest median of train/loss`.
        value: The value, which may be NaN or inf.
        first_step: First step of the measured range.
        last_step: Last step of the range; equal to `first_step` for a single step.
    """

    what: str
    value: float
    first_step: int
    last_step: int

    def __str__(self) -> str:
        where = f"step {self.first_step:,}"
        if self.last_step != self.first_step:
            where = f"steps {self.first_step:,} to {self.last_step:,}"
        return f"{self.what} {self.value:.4g} at {where}"


def medians(curve: Curve, *blocks: Block) -> tuple[Evidence, ...]:
    """Return the medians of blocks of a curve as evidence."""
    name = f"median of {curve.name}"
    return tuple(Evidence(name, block.median, block.first_step, block.last_step) for block in blocks)


@dataclass(frozen=True)
class Cause:
    """A possible cause and how to test it."""

    text: str
    test: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem found in a run.

    Attributes:
        severity: `critical`: the run is lost or wasted; `warning`: it costs quality or time; `note`: worth a look.
        meaning: Explanation in one sentence.
        evidence: Measured values that support the finding.
        causes: Possible causes, most likely first.
        name: Name of the symptom in the catalogue; set by `examine`.
    """

    severity: Severity
    meaning: str
    evidence: tuple[Evidence, ...]
    causes: tuple[Cause, ...]
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-serializable values; NaN and inf become text."""
        evidence = [
            asdict(item) | {"value": item.value if math.isfinite(item.value) else str(item.value)}
            for item in self.evidence
        ]
        return (
            {"name": self.name}
            | asdict(self)
            | {"evidence": evidence, "causes": [asdict(cause) for cause in self.causes]}
        )


@dataclass(frozen=True)
class Symptom:
    """An entry of the catalogue.

    Attributes:
        name: Short name with underscores.
        title: How the symptom appears in the curves, for the table of symptoms.
        needs: Roles of the curves required for the check.
        find: Returns the finding, or None.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    find: Callable[[Run], Finding | None]
