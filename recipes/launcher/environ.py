"""Remove environment variables that would make a new run part of another one."""

import os
from collections.abc import Mapping, MutableMapping, Sequence

from recipes.runtime.world import FOREIGN_VARIABLES, OWN_PREFIX, OWN_VARIABLES, RANK_FILE

# a process with these would join another run, as a rank or with its W&B id
_RUN_VARIABLES = (*OWN_VARIABLES, "PL_GLOBAL_SEED", "WANDB_RUN_ID", "WANDB_RESUME", RANK_FILE)
_SLURM_PREFIX = "SLURM"
_SLURM_KEPT = ("SLURM_CONF",)  # location of the cluster's configuration, independent of this process


def clean_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without variables of torchrun, SLURM or a run's ranks."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _RUN_VARIABLES and not name.startswith(OWN_PREFIX) and not _is_of_slurm(name)
    }


def forget_slurm(overrides: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove SLURM's variables if `ignore_slurm=true`: a run in an allocation is then a plain process.

    srun also sets those of MPI for its tasks.
    """
    if any(override.lower() == "ignore_slurm=true" for override in overrides):
        for name in [name for name in environ if _is_of_slurm(name) or name in FOREIGN_VARIABLES]:
            del environ[name]


def _is_of_slurm(name: str) -> bool:
    return name.startswith(_SLURM_PREFIX) and name not in _SLURM_KEPT
