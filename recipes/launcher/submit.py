"""Submit one run to a cluster and return."""

import sys

from recipes.config.compose import Composed, claim_folder
from recipes.errors import ConfigError
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER, open_console
from recipes.runtime.world import started_by


def is_for_cluster(composed: Composed) -> bool:
    """Return whether a run must be submitted, i.e. is not already running in a cluster job."""
    config = composed.config
    launcher = config["launcher"]["_target_"] if "launcher" in config else ""
    if not launcher.endswith(".Slurm") or started_by() is not None:
        return False
    if not composed.trains:
        print("launcher=slurm submits training runs only; this one runs here", file=sys.stderr)
    return composed.trains


def submit(composed: Composed) -> int:
    """Submit a run as a job that resumes in its run folder whenever the cluster restarts it.

    Returns:
        Exit code: 0, or 2 if the run cannot be submitted.
    """
    from recipes.config.instantiate import make
    from recipes.errors import format_report
    from recipes.launcher.job import JOB_FILE, Job, read_job
    from recipes.runtime.exit_codes import ExitCode

    open_console()
    try:
        claim_output(composed.run_folder.parent, "hydra.run.dir")
        composed = claim_folder(composed)
    except ConfigError as mistake:
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    config = composed.config
    if config["resume"] is None:
        config["resume"] = "auto"
    folder = composed.run_folder
    job = Job(number=0, folder=folder, overrides=composed.overrides, composed=composed)
    try:
        # from an earlier submission, which may still be in the queue
        if (folder / JOB_FILE).is_file():
            job.cluster_job = read_job(folder / JOB_FILE).cluster_job
        launcher = make(config["launcher"])
        job.save()
        earlier_id = job.cluster_job
        launcher.start([job])
    except ConfigError as mistake:
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    job_id = job.cluster_job
    status = "Submitted as" if job_id != earlier_id else "Already in the queue as"
    LOGGER.info(f"{status} job {job_id}; run folder: {folder}")
    LOGGER.info(f"squeue --jobs={job_id}; tail -F {launcher.log_path(job)}; scancel {job_id}")
    return ExitCode.FINISHED
