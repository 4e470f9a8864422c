"""Detect loss spikes and respond: skip the update, roll back, back off the learning rate, or stop.

Terms: an *outlier* is a loss or gradient norm far above recent values; it raises an alarm. A *spike* is a step with
an alarm; its update can be *skipped*. A *snapshot* is a copy of the train state; it is good once its *quarantine* has
passed without a spike. A *rollback* restores a good snapshot. A second rollback within the *cooldown* also starts a
*learning-rate backoff*. A *debug dump* stores the batch, losses and weights of a spike for mode=replay.

    every step -> detector, monitor -> escalation: none | skip | rollback | rollback_and_backoff | stop -> recovery
"""
