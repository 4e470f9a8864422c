"""SLURM's programs on this machine: where they are, and Debian's packages where they are not yet."""

import os
import shutil
import subprocess
from collections.abc import Sequence

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PACKAGES = ("slurm-wlm", "munge")


def missing() -> str | None:
    """Why there can be no SLURM here, or None. Installs Debian's where that is possible.

    Returns:
        A reason to skip with, or None where every program is there.
    """
    absent = _absent()
    if not absent:
        return None
    said = "only root can install it, with apt-get"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        said = _install()
        absent = _absent()
    return f"no {', '.join(absent)} here: {said}" if absent else None


def path_with_daemons() -> str:
    """Where daemons are too: /usr/sbin is not on the path of everyone."""
    return os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))


def _absent() -> list[str]:
    return [
        program for program in _PROGRAMS if shutil.which(program, path=path_with_daemons()) is None
    ]


def _install() -> str:
    """What apt-get said where it could not: a list of packages that is old may still do."""
    quick = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20")
    steps: Sequence[Sequence[str]] = (
        ("apt-get", *quick, "update"),
        ("apt-get", *quick, "install", "-y", "--no-install-recommends", *_PACKAGES),
    )
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for step in steps:
        done = subprocess.run(step, env=quiet, capture_output=True, text=True)
        if done.returncode:
            said = f"apt-get cannot install it: {done.stderr.strip()[-300:]}"
    return said
