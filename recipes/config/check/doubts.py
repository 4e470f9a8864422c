"""Find settings that are allowed and rarely meant; each is a line of the log before a run, not a mistake."""

from collections.abc import Iterator

from recipes.config.check.metrics import find_wrong_directions
from recipes.config.check.strategy import find_rate_of_another_optimizer
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.errors import ConfigError


def find_doubts(run: ResolvedRun, *, is_continued: bool) -> Iterator[ConfigError]:
    """Yield what is doubtful in a run that trains.

    Args:
        run: The run; its length is known in steps.
        is_continued: Whether its weights come from a checkpoint of its own.
    """
    yield from find_wrong_directions(run.config)
    yield from find_rate_of_another_optimizer(run)
    if run.task.has_own_training:
        return
    yield from find_endless_warmup(run)
    yield from find_short_plateau(run)
    if not is_continued:
        yield from find_random_base(run)


def find_random_base(run: ResolvedRun) -> Iterator[ConfigError]:
    """Yield a fine-tuning of random weights: of an adapter, or on conversations."""
    if run.start_from is not None or run.model.pretrained is not None:
        return
    fine_tunes = find_signature(run.config["data"]["_target_"]).constants.get("fine_tunes") is True
    if run.adapter is None and not fine_tunes:
        return
    adapter = "" if run.adapter is None else f"adapter={run.choices.get('adapter', run.adapter)} "
    setting = f"{adapter}model={run.choices.get('model', '…')}"
    reason = "neither model.pretrained nor start_from is set, so it fine-tunes random weights"
    reason = f"{reason} at optimizer.lr={run.lr:g}"
    fix = "model=huggingface model.name=<folder of a published model>, or start_from=<run folder>"
    yield ConfigError(setting, reason, fix)


def find_endless_warmup(run: ResolvedRun) -> Iterator[ConfigError]:
    """Yield a warm-up that is as long as the run."""
    own = "scheduler.warmup_steps"
    name = "warmup_steps" if run.references.get(own) == "warmup_steps" else own
    warmup_steps = run.config["scheduler"].get("warmup_steps")
    if isinstance(warmup_steps, int) and warmup_steps >= run.max_steps > 1:
        reason = f"the learning rate only rises, to {run.max_steps / warmup_steps:.0%} of optimizer.lr in the last step"
        fix = f"{name}={run.max_steps // 10}"
        yield ConfigError(f"{name}={warmup_steps} trainer.max_steps={run.max_steps}", reason, fix)


def find_short_plateau(run: ResolvedRun) -> Iterator[ConfigError]:
    """Yield a schedule that waits for more validations than there are before the last step."""
    scheduler = run.config["scheduler"]
    if find_signature(scheduler["_target_"]).constants.get("counts_validations") is not True or run.max_steps < 2:
        return
    needed = scheduler["patience"] + 2  # the first one is the best so far, and one more than patience are not
    found = (run.max_steps - 1) // run.eval_every
    if found < needed:
        typed = f"scheduler.patience={scheduler['patience']} eval_every={run.eval_every}"
        reason = f"a reduction follows validation {needed} at the earliest, and {found} come before the last step"
        every = (run.max_steps - 1) // needed
        fix = f"eval_every={every}" if every else f"trainer.max_steps={needed + 1} or more, and eval_every=1"
        yield ConfigError(f"{typed} trainer.max_steps={run.max_steps}", reason, fix)
