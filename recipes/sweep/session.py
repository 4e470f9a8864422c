"""The state of one `-m` command that Hydra has no channel for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class MultirunState:
    """Inputs that Hydra does not pass to a launcher, and the exit code it does not pass back.

    Attributes:
        config_folder: The folder from which jobs are composed.
        config_name: The primary config.
        keys: The keys swept over on the command line.
        ranking: The objective of the sweep and its direction, where checkpoints decide them.
        command: The full command line, without the program.
        exit_code: The exit code of the sweep.
    """

    config_folder: Path = Path()
    config_name: str = "config"
    keys: Sequence[str] = ()
    ranking: Sequence[str] = ()
    command: Sequence[str] = ()
    exit_code: int = 0


MULTIRUN = MultirunState()
