"""What a run will need, before it starts: a training step on tensors without storage, its memory, time and cost.

`trace` records the operators of a step, `step` runs the step of a config, `memory` and `roofline` turn the record into
bytes and seconds.
"""
