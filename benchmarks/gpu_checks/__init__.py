"""The checks of `gpu_check.py`: what has to hold on a GPU, each by real commands or runs with overrides as typed.

`plan.py` lists them. A check is a function `(Settings) -> Outcome` that runs in a process of its own; it raises `Skip`
where the machine lacks what it needs. Anything else that it raises is a failure, recorded with its last lines.
"""
