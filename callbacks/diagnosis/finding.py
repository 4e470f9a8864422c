"""What a symptom looks like once it is found: evidence as numbers, its meaning, and causes with what tests them."""

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
    """One number of a run.

    Attributes:
        what: What it is, such as `lowest median of train/loss`.
        value: The number; NaN and inf are kept.
        first_step: Where it was measured.
        last_step: The end of the range; equal to `first_step` for a single step.
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
    """Return the medians of parts of a curve as evidence."""
    name = f"median of {curve.name}"
    return tuple(Evidence(name, block.median, block.first_step, block.last_step) for block in blocks)


@dataclass(frozen=True)
class Cause:
    """A possible cause, and what to type or do to test it."""

    text: str
    test: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run.

    Attributes:
        severity: `critical`, the run is lost or wasted; `warning`, it costs quality or time; `note`, worth a look.
        meaning: One sentence.
        evidence: The numbers that raised it.
        causes: The most probable first.
        name: Of its symptom in the catalogue, which the examination fills in.
    """

    severity: Severity
    meaning: str
    evidence: tuple[Evidence, ...]
    causes: tuple[Cause, ...]
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them; a number that is not finite becomes text."""
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
        name: Short, with underscores.
        title: What one sees in the curves, for the table of symptoms.
        needs: Roles of the curves without which nothing can be said.
        find: Returns the finding, or None.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    find: Callable[[Run], Finding | None]
