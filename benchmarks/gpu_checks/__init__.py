"""The checks of `gpu_check.py`: requirements on a GPU, tested with real commands, or runs built from typed overrides.

`plan.py` lists them. A check is a function `(Settings) -> Outcome` that runs in a separate process; it raises `Skip`
if the machine lacks something that it needs. Any other exception is a failure, recorded with its last lines.
"""
