"""Train, and leave behind what the contract names."""

import json
from typing import Any

from recipes.build import TOKENIZER_FOLDER, Run
from recipes.checkpoint.resume import step_of
from recipes.compose import ENVIRONMENT_FILE
from recipes.console import LOGGER
from recipes.environment import describe_environment
from recipes.logger.summary import SUMMARY_FILE


def fit(run: Run) -> int:
    """Train from the beginning or from a checkpoint, to `trainer.max_steps`.

    Returns:
        0; a crash leaves by its exception, after the summary is written.
    """
    step = step_of(run.checkpoint) if run.checkpoint else 0
    if step >= run.trainer.max_steps:
        LOGGER.info(f"Nothing to do: {run.checkpoint} is at step {step} of {run.trainer.max_steps}")
        return 0
    LOGGER.info(f"{run.name}: the run's folder is {run.folder}")
    record = json.dumps(describe_environment(run.overrides) | {"tags": run.tags}, indent=2)
    (run.folder / ENVIRONMENT_FILE).write_text(record + "\n")
    run.data.prepare_data()
    LOGGER.info(f"data: {run.data.source.describe()}")
    tokenizer = run.data.source.tokenizer
    if tokenizer is not None:
        tokenizer.save(run.folder / TOKENIZER_FOLDER)
    for logger in run.trainer.loggers:
        if step and hasattr(logger, "resume_at"):
            logger.resume_at(step)
    _log_event(run, "resume" if run.checkpoint else "start", step)
    _fit(run)
    LOGGER.info(_last_line(run))
    return 0


def _fit(run: Run) -> None:
    try:
        run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    except SystemExit as left:
        _log_event(run, "end", run.trainer.global_step, status="interrupted")
        # Lightning turns Ctrl-C into exit(1), which a crash looks like too
        if run.trainer.interrupted:
            raise KeyboardInterrupt from left
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        _log_event(run, "end", run.trainer.global_step, status="failed", error=what)
        raise
    _log_event(run, "end", run.trainer.global_step, status="finished")


def _log_event(run: Run, event: str, step: int, **fields: Any) -> None:
    for logger in run.trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, step, **fields)


def _last_line(run: Run) -> str:
    summary = json.loads((run.folder / SUMMARY_FILE).read_text())
    parts = [f"{summary['steps']} steps"]
    parts += [
        f"{name.replace('_', ' ')} {summary[name]:.4f}"
        for name in ("train_loss", "val_loss")
        if summary[name] is not None
    ]
    if summary["tokens_per_second"] is not None:
        parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
    return f"Finished: {', '.join(parts)}, in {run.folder}"
