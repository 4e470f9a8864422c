"""The state of one `-m` command: what Hydra neither hands to a launcher nor takes back from one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class MultirunState:
    """What Hydra does not hand to a launcher, and takes back from none.

    Attributes:
        config_folder: Where the jobs are composed from.
        config_name: The file that composition begins with.
        keys: What is swept over in the words that were typed.
        command: All words of the command.
        exit_code: Of the sweep.
    """

    config_folder: Path = Path()
    config_name: str = "config"
    keys: Sequence[str] = ()
    command: Sequence[str] = ()
    exit_code: int = 0


MULTIRUN = MultirunState()
