"""Check each step's loss and gradient norm for spikes: arithmetic on Python floats, no torch."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from .detector import Alarm, SpikeDetector


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """Loss and norm of one optimizer step, equal on every rank.

    Attributes:
        step: Optimizer steps completed, this one included.
        loss: Mean over all ranks.
        norm: Global gradient norm before clipping; None if unknown.
        skipped: Whether its update was skipped.
    """

    step: int
    loss: float
    norm: float | None
    skipped: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of checking a step.

    Attributes:
        measurement: The step's loss and norm.
        alarms: Alarms by series, `loss` or `norm`.
        score: The larger of the two scores, in robust standard deviations; inf if a value is not finite.
        skipped: Whether the update was skipped, except by a loss scaler after a finite loss, whose skips are normal.
        overflowed: Whether a loss scaler skipped the step and can lower its scale further.
    """

    measurement: StepMeasurement
    alarms: dict[str, Alarm]
    score: float
    skipped: bool
    overflowed: bool = False

    @property
    def drifts(self) -> bool:
        """Whether the loss is drifting upward."""
        return any(alarm.kind == "drift" for alarm in self.alarms.values())

    @property
    def is_non_finite(self) -> bool:
        """Whether loss or norm is NaN or inf."""
        return any(alarm.kind == "non_finite" for alarm in self.alarms.values())

    @property
    def is_harmless(self) -> bool:
        """Whether loss or norm is NaN or inf but the step was applied, since its gradients were finite."""
        return self.is_non_finite and not self.skipped

    @property
    def is_outlier(self) -> bool:
        """Whether loss and norm are finite and one is a spike, or was one when the guard skipped the step."""
        is_spike = any(alarm.kind == "spike" for alarm in self.alarms.values())
        return (is_spike or self.skipped) and not self.is_non_finite


class SpikeMonitor:
    """Detects spikes in loss and gradient norm, and derives the limits for the next step.

    Args:
        window: Recent normal steps that each step is compared with.
        warmup_steps: Steps before spikes can be detected; at most `window`.
        loss_threshold: Robust standard deviations above the median at which a loss is a spike.
        norm_threshold: The same for the logarithm of the norm, which is heavy-tailed in healthy runs.
        drift_threshold: For the slow rule, on the loss alone, since norms in healthy runs can rise for thousands of
            steps. None disables it.
        min_rise: Also require a loss or norm to exceed its median by this multiple of the distance from the median to
            the largest normal value so far. 0 uses spread alone.
        skips_outliers: Whether `limits` is finite, so that finite outliers are skipped.
        finds_levels: Also report a drift when the loss has risen and stays up; see `SpikeDetector`.

    Raises:
        ValueError: A setting is out of range, or `warmup_steps` exceeds `window`.
    """

    def __init__(
        self,
        *,
        window: int,
        warmup_steps: int,
        loss_threshold: float,
        norm_threshold: float,
        drift_threshold: float | None,
        min_rise: float = 0.0,
        skips_outliers: bool = True,
        finds_levels: bool = False,
    ) -> None:
        thresholds = {"loss_threshold": loss_threshold, "norm_threshold": norm_threshold}
        thresholds |= {} if drift_threshold is None else {"drift_threshold": drift_threshold}
        for name, value in thresholds.items():
            if not value > 0:
                raise ValueError(f"{name}={value}: normal steps would be outliers; type a number above 0")
        if min_rise < 0:
            raise ValueError(f"min_rise={min_rise}: it is a multiple of a distance; type 0 or more")
        self._skips_outliers = skips_outliers
        make_detector = partial(SpikeDetector, window=window, warmup_steps=warmup_steps, min_rise=min_rise)
        self.detectors = {
            "loss": make_detector(
                spike_score=loss_threshold, drift_threshold=drift_threshold, finds_levels=finds_levels
            ),
            "norm": make_detector(spike_score=norm_threshold, drift_threshold=None, logarithmic=True),
        }

    def judge(self, measurement: StepMeasurement, *, overflowed: bool, has_falling_loss: bool = True) -> Verdict:
        """Compare a step with the steps before it.

        Args:
            measurement: The step's loss and norm.
            has_falling_loss: Whether a high loss is a bad one. If not, as for a policy, whose loss lies around 0 and
                whose single steps have no gradient, it is only checked for NaN and inf, and so is a norm of 0.
            overflowed: Whether a loss scaler skipped it and can lower its scale further. An infinite norm is then
                expected and raises no alarm.
        """
        values = {"loss": measurement.loss, "norm": measurement.norm}
        if overflowed:
            values["norm"] = None
        if not has_falling_loss:
            values = {
                "loss": None if math.isfinite(measurement.loss) else measurement.loss,
                "norm": values["norm"] or None,
            }
        scores, alarms = [0.0], {}
        for name, value in values.items():
            if value is None:
                continue
            detector = self.detectors[name]
            scores.append(detector.score(value))
            alarm = detector.observe(value)
            if alarm is not None:
                alarms[name] = alarm
        skipped = measurement.skipped and not (overflowed and math.isfinite(measurement.loss))
        return Verdict(
            measurement=measurement, alarms=alarms, score=max(scores), skipped=skipped, overflowed=overflowed
        )

    def limits(self) -> tuple[float, float]:
        """Return the loss and norm at which the next step is skipped."""
        if not self._skips_outliers:
            return math.inf, math.inf
        return self.detectors["loss"].limit(), self.detectors["norm"].limit()

    def forget(self) -> None:
        """Relearn the normal level from scratch."""
        for detector in self.detectors.values():
            detector.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {name: detector.state_dict() for name, detector in self.detectors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        for name, detector in self.detectors.items():
            detector.load_state_dict(state[name])
