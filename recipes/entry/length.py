"""Count the training data of a run whose length is a number of passes over it, `trainer.max_steps=3epochs`."""

from dataclasses import replace

from recipes.checkpoint.resume import find_checkpoint
from recipes.config.check import check_config
from recipes.config.epochs import MAX_STEPS, count_steps
from recipes.config.resolved import ResolvedRun
from recipes.config.resume import list_saved_parts
from recipes.data import prepare_with
from recipes.entry.light_import import without_unused_packages
from recipes.errors import ConfigError, ConfigErrors
from recipes.files import count
from recipes.runtime.console import LOGGER
from recipes.runtime.world import global_rank


def settle_length(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with its length in optimizer steps, and every setting that refers to it.

    The data is prepared, as the run does again from the cache. A run that resumes counts again: another global batch
    takes another number of steps, other data has other samples.

    Raises:
        ConfigError: The data has no pass of its own.
        ConfigErrors: A setting does not fit the number of steps.
    """
    epochs = resolved.epochs
    if epochs is None or not (resolved.mode.takes_steps or resolved.mode.plans_steps):
        return resolved
    if resolved.has_own_loaders:
        return resolved  # they are made once the ranks have met, and say only then how many batches they have
    num_samples = _count_samples(resolved)
    steps = count_steps(epochs, num_samples=num_samples, global_batch_size=resolved.global_batch_size)
    passes = count(1, "epoch") if epochs == "1" else f"{epochs} epochs"
    if global_rank() == 0:
        LOGGER.info(
            f"length: {passes} of {count(num_samples, 'sample')} {'is' if epochs == '1' else 'are'}"
            f" {count(steps, 'step')} of {count(resolved.global_batch_size, 'sample')}"
        )
    settled = replace(resolved.with_settings(dict.fromkeys(resolved.list_followers(MAX_STEPS), steps)), epochs=None)
    if mistakes := check_config(settled, settled.typed):
        raise ConfigErrors(mistakes, f"{passes} of this data are {count(steps, 'step')}; nothing was built.")
    return settled


def _count_samples(resolved: ResolvedRun) -> int:
    """Return the samples of one pass: of the whole training split, or of what the run repeats of it."""
    overfit_batches: int | None = resolved.config["loader"].get("overfit_batches")
    if overfit_batches is not None:
        return overfit_batches * resolved.global_batch_size
    checkpoint = find_checkpoint(resolved.resume, resolved.run_folder)
    if checkpoint is not None:
        resolved = resolved.with_settings(list_saved_parts(resolved.config, checkpoint))
    with without_unused_packages(resolved.list_targets()):
        source = resolved.make("data")
    prepare_with(source, None)
    dataset = source.train()
    if hasattr(dataset, "samples_per_epoch"):
        return int(dataset.samples_per_epoch)
    if hasattr(dataset, "count_epochs"):
        raise ConfigError(
            f"{MAX_STEPS}={resolved.epochs}epochs",
            "a mixture has no pass of its own: it repeats each source at a rate of its own",
            f"{MAX_STEPS}=<optimizer steps>",
        )
    return len(dataset)
