"""Check a run for every symptom in the catalogue; takes a tenth of a second for a thousand rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .answers import find_falling_answers
from .epochs import find_memorizing, find_repeated_order
from .finding import SEVERITIES, Finding, Symptom
from .generalization import find_easier_validation, find_no_validation, find_overfitting
from .gradients import find_collapsing_scale, find_constant_clipping, find_rising_norm, find_skipped_steps
from .learning import find_divergence, find_early_decay, find_short_warmup, find_stuck_loss, find_unfinished_decay
from .read import read_run, read_runs
from .rewards import (
    find_clipped_ratios,
    find_collapsed_entropy,
    find_failing_rewards,
    find_flat_reward,
    find_growing_completions,
    find_hacked_reward,
    find_no_spread,
    find_sampler_gap,
)
from .run import DESCRIBED, ROLES, Run
from .speed import find_data_wait, find_growing_memory, find_slowdown
from .spikes import find_bad_batches, find_unstable_spikes

# alternative curves, one of which is enough
_ALTERNATIVES = {"speed": ("speed", "step_seconds"), "memory": ("memory", "device_memory")}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings of a run, and which symptoms were checked.

    Attributes:
        findings: Findings, most harmful and certain first.
        examined: Names of the symptoms checked.
        not_examined: Names of the symptoms that could not be checked, by the reason.
        notes: Irregularities in the files, one sentence each.
    """

    findings: Sequence[Finding]
    examined: Sequence[str]
    not_examined: dict[str, list[str]]
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield console lines: findings, symptoms checked and not checked, notes on the files."""
        for number, finding in enumerate(self.findings, start=1):
            yield f"{number}. {finding.name} ({finding.severity}): {finding.meaning}"
            yield from (f"   {evidence}" for evidence in finding.evidence)
            for cause in finding.causes:
                yield f"   - {cause.text}"
                yield f"     try: {cause.test}"
        if not self.findings:
            yield "no finding"
        yield f"checked: {', '.join(self.examined)}"
        for missing, names in self.not_examined.items():
            yield f"not checked: {', '.join(names)}: {missing}"
        yield from (f"the file: {note}" for note in self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-serializable values."""
        return {
            "findings": [finding.as_dict() for finding in self.findings],
            "examined": list(self.examined),
            "not_examined": self.not_examined,
            "notes": list(self.notes),
        }


def diagnose(path: Path | str, *, run: str | None = None, steps_per_epoch: float | None = None) -> list[Finding]:
    """Return the problems found in a run, most harmful and certain first; empty if there are none.

    Args:
        path: A run folder, any folder with a `metrics.csv`, or a file in a format of `read`, beside this module.
        run: Name of the run, if the file holds several.
        steps_per_epoch: Optimizer steps per epoch; None infers them from the run's columns or config if possible.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, is not a table, or has no step column or no numbers; or it holds several runs and
            none of them is named.
    """
    return list(diagnose_run(path, run=run, steps_per_epoch=steps_per_epoch).findings)


def diagnose_run(path: Path | str, *, run: str | None = None, steps_per_epoch: float | None = None) -> Diagnosis:
    """Return the findings of a run and which symptoms were checked; takes the same arguments as `diagnose`."""
    return examine(read_run(Path(path), run=run, steps_per_epoch=steps_per_epoch))


def diagnose_runs(path: Path | str, *, steps_per_epoch: float | None = None) -> dict[str, Diagnosis]:
    """Return the diagnosis of each run of a file by name; the name is empty if the file does not have one."""
    runs = read_runs(Path(path), steps_per_epoch=steps_per_epoch)
    return {name: examine(run) for name, run in runs.items()}


def examine(run: Run) -> Diagnosis:
    """Check for every symptom whose curves are available."""
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
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))  # stable sort: keeps the catalogue's order
    return Diagnosis(findings=findings, examined=examined, not_examined=not_examined, notes=run.notes)


def _find_missing(run: Run, symptom: Symptom) -> str | None:
    """Describe what a symptom needs but the run lacks; None if nothing is missing."""
    for role in symptom.needs:
        if role == "falling_loss":
            if run.learns_from_rewards:
                return "the loss of a policy lies around 0, whatever it learns: its reward is checked instead"
            role = "loss"
        if role == "epoch":
            if len(run.epoch_starts) < 3:
                return "needs at least three epochs: add a column `epoch` or set steps_per_epoch"
            continue
        if not any(other in run.curves for other in _ALTERNATIVES.get(role, (role,))):
            columns = [name for other in _ALTERNATIVES.get(role, (role,)) for name in ROLES[other][:3]]
            return f"{DESCRIBED[role]}: no column {', '.join(columns)} or similar"
    return None


# The catalogue of symptoms; within a severity, findings are listed in this order, most harmful and certain first.

CATALOGUE = (
    Symptom(
        "loss_scale_collapsing", "the loss scale is halved again and again", ("loss_scale",), find_collapsing_scale
    ),
    Symptom("diverged", "the loss falls, then rises for good or is NaN", ("loss",), find_divergence),
    Symptom("nothing_learned", "the loss stays at its first value or ln(classes)", ("falling_loss",), find_stuck_loss),
    Symptom(
        "decayed_too_early",
        "the learning rate is near zero long before the end",
        ("falling_loss", "learning_rate"),
        find_early_decay,
    ),
    Symptom(
        "not_shuffled", "the loss repeats its course in every epoch", ("falling_loss", "epoch"), find_repeated_order
    ),
    Symptom("overfitting", "validation rises, training falls", ("falling_loss", "val_loss"), find_overfitting),
    Symptom("warmup_too_short", "a hump at the start", ("falling_loss", "learning_rate"), find_short_warmup),
    Symptom("unstable_spikes", "spikes with large gradients, slow recovery", ("falling_loss",), find_unstable_spikes),
    Symptom("bad_batches", "spikes of single steps", ("falling_loss",), find_bad_batches),
    Symptom("steps_lost", "skipped steps, rollbacks, single NaN", ("loss",), find_skipped_steps),
    Symptom(
        "gradient_norm_rising",
        "the gradient norm grows, the loss does not fall",
        ("falling_loss", "grad_norm"),
        find_rising_norm,
    ),
    Symptom(
        "clipped_every_step",
        "every step is clipped heavily",
        ("clipped_fraction", "grad_norm"),
        find_constant_clipping,
    ),
    Symptom("memorizing", "the loss drops at each epoch boundary", ("falling_loss", "epoch"), find_memorizing),
    Symptom(
        "easier_validation", "validation is better than training", ("falling_loss", "val_loss"), find_easier_validation
    ),
    Symptom("reward_hacked", "the reward rises, held-out answers get worse", ("reward",), find_hacked_reward),
    Symptom("no_spread", "all completions of a group have the same reward", ("reward", "no_spread"), find_no_spread),
    Symptom("reward_flat", "the reward stays where it began", ("reward",), find_flat_reward),
    Symptom(
        "entropy_collapsed",
        "the entropy vanishes before the reward is high",
        ("reward", "entropy"),
        find_collapsed_entropy,
    ),
    Symptom(
        "completions_growing",
        "completions grow until they are cut off, without more reward",
        ("reward", "completion_tokens", "truncated"),
        find_growing_completions,
    ),
    Symptom(
        "sampler_disagrees",
        "sampler and model compute other probabilities",
        ("reward", "logprob_gap"),
        find_sampler_gap,
    ),
    Symptom(
        "ratios_clipped", "a third of the tokens or more is clipped", ("reward", "clipped_tokens"), find_clipped_ratios
    ),
    Symptom(
        "reward_fails", "a reward function raises, hangs or dies", ("reward", "reward_errors"), find_failing_rewards
    ),
    Symptom("answers_less_probable", "preferences: both answers become less probable", (), find_falling_answers),
    Symptom("slowing_down", "steps become slower and slower", ("speed",), find_slowdown),
    Symptom("waiting_for_data", "part of each step is spent waiting for data", ("data_wait",), find_data_wait),
    Symptom("memory_growing", "memory keeps growing", ("memory",), find_growing_memory),
    Symptom("ended_before_decay", "the schedule is longer than the run", ("learning_rate",), find_unfinished_decay),
    Symptom("never_validated", "no validation loss", (), find_no_validation),
)
