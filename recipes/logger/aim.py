"""Log to Aim, which keeps its runs in a folder of this machine or on a server of its own."""

from typing import Annotated

from lightning.pytorch.loggers.logger import Logger

from recipes.errors import ConfigError


def make_aim_logger(
    *,
    repo: str,
    experiment: str,
    run_name: str | None,
    system_tracking_interval: Annotated[float, "> 0"] | None,
    run_hash: str | None = None,
) -> Logger:
    """Return Aim's own logger for Lightning.

    It neither wraps the console, whose lines are in train.log, nor lists the installed packages, which environment.json
    does: Aim 3.29 reads them with `pkg_resources`, which setuptools no longer has.

    Args:
        repo: Folder that contains `.aim`, or the address of a server.
        experiment: Name under which Aim groups runs.
        run_name: Name of the run.
        system_tracking_interval: Seconds between rows of the machine's use; None: none.
        run_hash: The run to go on in; None: a new one.

    Raises:
        ConfigError: Aim is not installed.
    """
    try:
        from aim.pytorch_lightning import AimLogger
    except ModuleNotFoundError as error:
        raise ConfigError("logger=aim", f"{error.name} is not installed", "pip install aim") from error
    logger: Logger = AimLogger(
        repo=repo,
        experiment=experiment,
        run_name=run_name,
        system_tracking_interval=system_tracking_interval,
        log_system_params=False,
        capture_terminal_logs=False,
        run_hash=run_hash,
    )
    return logger
