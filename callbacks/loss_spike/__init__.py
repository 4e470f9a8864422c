"""Detect loss spikes, skip the step, roll back, back off the learning rate, stop.

Vocabulary: an *outlier* is a loss or gradient norm far above the recent ones; it raises an alarm. A *spike* is a step
with an alarm. Its update is *skipped*. A *snapshot* is a copy of the train state; it is good when its *quarantine*
has passed without a spike. To *roll back* is to restore a good snapshot. A second rollback within the *cooldown* also
starts a *learning-rate backoff*. A *debug dump* keeps the batch, losses and weights of a spike for mode=replay.

    every step -> detector, monitor -> escalation: none | skip | rollback | rollback_and_backoff | stop -> recovery
"""
