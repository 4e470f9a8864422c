"""Plan the memory, time and cost of a run in advance by tracing a training step on tensors without storage.

`trace` records the operators of a step, `step` runs the step of a config, `memory` and `roofline` turn the record into
bytes and seconds.
"""
