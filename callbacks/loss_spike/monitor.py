"""Loss and gradient norm of every step, judged together. Arithmetic on host numbers, no torch."""

import math
from dataclasses import dataclass
from typing import Any

from .detector import Alarm, SpikeDetector


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """Of one optimizer step, the same on every rank.

    Attributes:
        step: Optimizer steps completed with it.
        loss: Mean over all ranks.
        norm: Global, before clipping; None where it is not known.
        refused: Whether the step was refused before it was made.
    """

    step: int
    loss: float
    norm: float | None
    refused: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is out of line about a step.

    Attributes:
        reading: Of that step.
        alarms: By series: `loss`, `norm`.
        score: The larger of both, in robust standard deviations; inf where one is not finite.
        refused: Whether the step was refused, other than by a loss scaler, which looks for its scale that way.
    """

    reading: StepMeasurement
    alarms: dict[str, Alarm]
    score: float
    refused: bool

    @property
    def drifts(self) -> bool:
        """Whether the loss has been too high for long."""
        return any(alarm.kind == "drift" for alarm in self.alarms.values())


class SpikeMonitor:
    """Two detectors, and the limits they set for the next step.

    Args:
        window, warmup_steps: Of both, see `SpikeDetector`.
        loss_threshold: Deviations from which a loss is a spike.
        norm_threshold: The same for the log of a norm, which has heavy tails in healthy runs.
        drift_threshold: Of the loss alone: norms of a healthy run rise for thousands of steps.
    """

    def __init__(
        self,
        *,
        window: int,
        warmup_steps: int,
        loss_threshold: float,
        norm_threshold: float,
        drift_threshold: float | None,
    ) -> None:
        self.detectors = {
            "loss": SpikeDetector(
                window=window,
                warmup_steps=warmup_steps,
                spike_score=loss_threshold,
                drift_threshold=drift_threshold,
            ),
            "norm": SpikeDetector(
                window=window,
                warmup_steps=warmup_steps,
                spike_score=norm_threshold,
                drift_threshold=None,
                logarithmic=True,
            ),
        }

    def judge(self, reading: StepMeasurement, *, overflowed: bool) -> Verdict:
        """Compare a step with those before it.

        Args:
            reading: Of the step.
            overflowed: Whether a loss scaler has skipped it.
        """
        values = {"loss": reading.loss, "norm": reading.norm}
        by_scaler = overflowed and math.isfinite(reading.loss)
        if by_scaler:
            values["norm"] = None
        scores, alarms = [0.0], {}
        for name, value in values.items():
            if value is None:
                continue
            detector = self.detectors[name]
            scores.append(detector.score(value))
            alarm = detector.observe(value)
            if alarm is not None:
                alarms[name] = alarm
        refused = reading.refused and not by_scaler
        return Verdict(reading=reading, alarms=alarms, score=max(scores), refused=refused)

    def limits(self) -> tuple[float, float]:
        """Loss and norm from which on the next step is refused."""
        return self.detectors["loss"].limit(), self.detectors["norm"].limit()

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: detector.state_dict() for name, detector in self.detectors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name, detector in self.detectors.items():
            detector.load_state_dict(state[name])
