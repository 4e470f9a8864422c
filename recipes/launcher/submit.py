"""Submit one run to a cluster and return."""

import sys

from recipes.config.compose import claim_folder
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER, open_console
from recipes.runtime.world import started_by


def is_for_cluster(resolved: ResolvedRun) -> bool:
    """Return whether a run must be submitted, i.e. is not already running in a cluster job."""
    if not resolved.runs_elsewhere or started_by() is not None:
        return False
    if not resolved.mode.trains:
        print("launcher=slurm submits training runs only; this one runs here", file=sys.stderr)
    return resolved.mode.trains


def submit(resolved: ResolvedRun) -> int:
    """Submit a run as a job that resumes in its run folder whenever the cluster restarts it.

    Returns:
        Exit code: 0, or 2 if the run cannot be submitted.
    """
    from recipes.errors import format_report
    from recipes.launcher.job import JOB_FILE, Job, read_job
    from recipes.runtime.exit_codes import ExitCode

    open_console()
    try:
        claim_output(resolved.run_folder.parent, "hydra.run.dir")
        resolved = claim_folder(resolved)
    except ConfigError as mistake:
        print(format_report([mistake]), file=sys.stderr)
        return ExitCode.INVALID_CONFIG
    if resolved.resume is None:
        resolved = resolved.with_settings({"resume": "auto"})
    folder = resolved.run_folder
    job = Job(number=0, folder=folder, overrides=resolved.overrides, composed=resolved)
    try:
        # from an earlier submission, which may still be in the queue
        if (folder / JOB_FILE).is_file():
            job.cluster_job = read_job(folder / JOB_FILE).cluster_job
        launcher = resolved.make("launcher")
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
