"""Train, and leave behind what the contract names."""

import json
from typing import Any

from recipes.build import TOKENIZER_FOLDER, Run
from recipes.compose import ENVIRONMENT_FILE
from recipes.console import LOGGER
from recipes.environment import describe_environment
from recipes.logger.summary import SUMMARY_FILE
from recipes.mistake import Mistake


def fit(run: Run) -> int:
    """Train from the beginning or from a checkpoint, to `trainer.max_steps`.

    Returns:
        0; a crash leaves by its exception, after the summary is written.
    """
    record = json.dumps(describe_environment(run.overrides), indent=2)
    (run.folder / ENVIRONMENT_FILE).write_text(record + "\n")
    LOGGER.info(f"{run.name}: the run's folder is {run.folder}")
    run.data.prepare_data()
    _agree(run)
    tokenizer = run.data.source.tokenizer
    if tokenizer is not None:
        tokenizer.save(run.folder / TOKENIZER_FOLDER)
    _log_event(run, "resume" if run.checkpoint else "start")
    try:
        _fit(run)
    except BaseException as error:
        _log_event(run, "end", status="failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        _write_reports(run)
    _log_event(run, "end", status="finished")
    LOGGER.info(_last_line(run))
    return 0


def _fit(run: Run) -> None:
    try:
        run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    except SystemExit as left:
        # Lightning turns Ctrl-C into exit(1), which a crash looks like too
        if run.trainer.interrupted:
            raise KeyboardInterrupt from left
        raise


def _agree(run: Run) -> None:
    """The tokenizer's size is known only once it is made: compare it with the model's vocabulary."""
    tokenizer = run.data.source.tokenizer
    if tokenizer is None:
        return
    known = run.vocab_size
    if known is not None and tokenizer.vocab_size > known:
        raise Mistake(
            f"model.vocab_size={known}",
            f"the tokenizer has {tokenizer.vocab_size} tokens",
            f"model.vocab_size={tokenizer.vocab_size}",
        )


def _log_event(run: Run, event: str, **fields: Any) -> None:
    for logger in run.trainer.loggers:
        if hasattr(logger, "log_event"):
            logger.log_event(event, run.trainer.global_step, **fields)


def _write_reports(run: Run) -> None:
    """Again, now that the loggers have written their last row, which they do after every callback."""
    for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
        if hasattr(callback, "write_report"):
            callback.write_report(run.folder)


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
