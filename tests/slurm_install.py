"""Find SLURM's programs on this machine, or install Debian's packages."""

import os
import shutil
import subprocess
from collections.abc import Sequence

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PACKAGES = ("slurm-wlm", "munge")


def missing() -> str | None:
    """Install Debian's packages if programs are missing and installation is possible.

    Returns:
        Why SLURM is unavailable, as a reason to skip; None if every program is found.
    """
    absent = _absent()
    if not absent:
        return None
    reason = "only root can install it, with apt-get"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        reason = _install()
        absent = _absent()
    return f"no {', '.join(absent)} here: {reason}" if absent else None


def path_with_daemons() -> str:
    """Return PATH with the folders of the daemons: not every user has /usr/sbin."""
    return os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))


def _absent() -> list[str]:
    return [program for program in _PROGRAMS if shutil.which(program, path=path_with_daemons()) is None]


def _install() -> str:
    """Return the error of apt-get, if any; a failed update is not fatal, because an old package list may suffice."""
    quick = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20")
    steps: Sequence[Sequence[str]] = (
        ("apt-get", *quick, "update"),
        ("apt-get", *quick, "install", "-y", "--no-install-recommends", *_PACKAGES),
    )
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    error = ""
    for step in steps:
        done = subprocess.run(step, env=environ, capture_output=True, text=True)
        if done.returncode:
            error = f"apt-get cannot install it: {done.stderr.strip()[-300:]}"
    return error
