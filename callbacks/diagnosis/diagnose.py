"""Examine a run for every symptom of the catalogue; a tenth of a second for a thousand rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .catalogue import CATALOGUE
from .finding import SEVERITIES, Finding, Symptom
from .read import read_run
from .run import DESCRIBED, ROLES, Run

# curves of which one is enough
_ALTERNATIVES = {"speed": ("speed", "step_seconds"), "memory": ("memory", "device_memory")}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, and what was looked for.

    Attributes:
        findings: The most harmful and certain first.
        examined: Names of the symptoms that were looked for.
        not_examined: Why others were not: what is missing, and the names of the symptoms that need it.
        notes: What is unusual about the files, a sentence each.
    """

    findings: Sequence[Finding]
    examined: Sequence[str]
    not_examined: dict[str, list[str]]
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines for a console: findings, what was and what could not be looked for, notes on the files."""
        for number, finding in enumerate(self.findings, start=1):
            yield f"{number}. {finding.name} ({finding.severity}): {finding.meaning}"
            yield from (f"   {evidence}" for evidence in finding.evidence)
            for cause in finding.causes:
                yield f"   - {cause.text}"
                yield f"     try: {cause.test}"
        if not self.findings:
            yield "no finding"
        yield f"looked for: {', '.join(self.examined)}"
        for missing, names in self.not_examined.items():
            yield f"could not look for {', '.join(names)}: {missing}"
        yield from (f"the file: {note}" for note in self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        return {
            "findings": [finding.as_dict() for finding in self.findings],
            "examined": list(self.examined),
            "not_examined": self.not_examined,
            "notes": list(self.notes),
        }


def diagnose(path: Path | str, *, steps_per_epoch: float | None = None) -> list[Finding]:
    """Return what is wrong with a run, the most harmful and certain first; empty if nothing is.

    Args:
        path: A run folder, any folder with a `metrics.csv`, or such a file under any name.
        steps_per_epoch: Optimizer steps of an epoch; None: from a column `epoch`, if there is one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is empty, no table, or has no column of steps or no numbers.
    """
    return list(diagnose_run(path, steps_per_epoch=steps_per_epoch).findings)


def diagnose_run(path: Path | str, *, steps_per_epoch: float | None = None) -> Diagnosis:
    """Return the findings of a run, and what could and could not be looked for; arguments as of `diagnose`."""
    return examine(read_run(Path(path), steps_per_epoch=steps_per_epoch))


def examine(run: Run) -> Diagnosis:
    """Look for every symptom whose curves there are."""
    findings, examined = [], []
    not_examined: dict[str, list[str]] = {}
    for symptom in CATALOGUE:
        missing = _find_missing(run, symptom)
        if missing is not None:
            not_examined.setdefault(missing, []).append(symptom.name)
            continue
        examined.append(symptom.name)
        finding = symptom.find(run)
        if finding is not None:
            findings.append(replace(finding, name=symptom.name))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))  # stable: the catalogue's order stays
    return Diagnosis(findings=findings, examined=examined, not_examined=not_examined, notes=run.notes)


def _find_missing(run: Run, symptom: Symptom) -> str | None:
    """Return what a symptom needs that the run has not, in words; None if all is there."""
    for role in symptom.needs:
        if role == "epoch":
            if len(run.epoch_starts) < 3:
                return "three epochs: neither a column `epoch` nor steps_per_epoch gives so many"
            continue
        if not any(other in run.curves for other in _ALTERNATIVES.get(role, (role,))):
            columns = [name for other in _ALTERNATIVES.get(role, (role,)) for name in ROLES[other][:3]]
            return f"{DESCRIBED[role]}: no column {', '.join(columns)} or similar"
    return None
