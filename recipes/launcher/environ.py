"""What others have left in the environment of a process that starts a run of its own."""

import os
from collections.abc import Mapping, MutableMapping, Sequence

from recipes.runtime.world import RANK_FILE

# what would make a job one of the ranks of another run, or a part of it
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    RANK_FILE,
)
_SLURM = "SLURM"
_OF_THE_CLUSTER = ("SLURM_CONF",)  # says where it is, not what we are to it


def _is_slurms(name: str) -> bool:
    return name.startswith(_SLURM) and name not in _OF_THE_CLUSTER


def clean_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which a process is nobody's rank."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_A_RANK and not name.startswith("TORCHELASTIC_") and not _is_slurms(name)
    }


def forget_slurm(overrides: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """With `ignore_slurm=true`: a run typed in an allocation is no job of SLURM's, here and in what it starts."""
    if any(word.lower() == "ignore_slurm=true" for word in overrides):
        for name in [name for name in environ if _is_slurms(name)]:
            del environ[name]
