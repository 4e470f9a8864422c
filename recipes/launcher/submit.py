"""One run handed to a cluster: submitted, and left to it."""

import sys

from recipes.config.compose import Composed
from recipes.errors import ConfigError
from recipes.runtime.console import LOGGER, open_console
from recipes.runtime.world import started_by


def is_for_cluster(composed: Composed) -> bool:
    """Whether a run is to be submitted, and is not one of the cluster's already."""
    config = composed.config
    launcher = config["launcher"]["_target_"] if "launcher" in config else ""
    if not launcher.endswith(".Slurm") or started_by() is not None:
        return False
    if not composed.trains:
        print("launcher=slurm submits what trains; this is carried out here", file=sys.stderr)
    return composed.trains


def submit(composed: Composed) -> int:
    """Submit it as a job that goes on in this run's folder whenever the cluster starts it again.

    Returns:
        The exit code: 0, or 2 where it cannot be.
    """
    from hydra.utils import instantiate

    from recipes.errors import format_report
    from recipes.launcher.job import JOB_FILE, Job, read_job
    from recipes.runtime.exit_codes import ExitCode

    open_console()
    config = composed.config
    if config["resume"] is None:
        config["resume"] = "auto"
    folder = composed.run_folder
    job = Job(number=0, folder=folder, overrides=composed.overrides, composed=composed)
    try:
        if (folder / JOB_FILE).is_file():  # an earlier start's, which may be in the queue yet
            before = read_job(folder / JOB_FILE)
            job.cluster_job = before.cluster_job
        place = instantiate(config["launcher"], _convert_="all")
        job.save()
        was = job.cluster_job
        place.start([job])
    except ConfigError as mistake:
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    name = job.cluster_job
    does = "Submitted as" if name != was else "In the queue already as"
    LOGGER.info(f"{does} job {name}; the run's folder is {folder}")
    LOGGER.info(f"squeue --jobs={name}; tail -F {place.log_of(job)}; scancel {name}")
    return 0
