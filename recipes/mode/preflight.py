"""Run a checklist before a long run: about a minute of trials of the recipe itself, one line per check."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes.config.resolved import ResolvedRun
from recipes.config.traits import declare_mode
from recipes.data import DataSource, prepare_with
from recipes.data.draws import has_draws
from recipes.engine import get_engine
from recipes.files import write_atomically
from recipes.mode.about import describe_command
from recipes.preflight import data as data_checks
from recipes.preflight.gradients import GradientProbe, check_frozen, check_gradients, check_optimizer
from recipes.preflight.model import Expected, check_model
from recipes.preflight.result import Result
from recipes.preflight.rollout import RolloutProbe, check_rollouts
from recipes.preflight.training import (
    check_accumulation,
    check_checkpoint,
    check_loader,
    check_precision,
    draw,
    overfit,
)
from recipes.run_folder import claim_output, has_keys, is_page
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.world import global_rank
from recipes.trial.steps import reject_resume, take_steps

_SAMPLES = 512  # inspected by the data checks
_MAX_VALUES = 1 << 26  # numbers of the images that the data checks hold in memory, 256 MiB
_SHOWN = 16
_DRAWN = 32  # micro-batches per rank


@declare_mode(takes_steps=True, reads_data=True, reads_logits=True)
def preflight(
    resolved: ResolvedRun, *, overfit_steps: Annotated[int, ">= 10"], path: str | None, write_page: Callable[..., None]
) -> int:
    """Print the result of each check.

    Args:
        resolved: The run.
        overfit_steps: Optimizer steps on one micro-batch.
        path: Folder for `preflight.json` and `preflight.html`; None only prints.
        write_page: (file, results as JSON, images) -> writes the page; it is also given `about`, of this command.

    Returns:
        The exit code: 0, or 4 if a check failed.

    Raises:
        ConfigError: The machine or the data does not support the config, or the run resumes,
            or `path` cannot be written to.
    """
    reject_resume(resolved)
    written = {"preflight.json": has_keys("results"), "preflight.html": is_page}
    folder = None if path is None else claim_output(path, "mode.path", replaces=written)
    results: list[Result] = []
    checklist = Checklist(resolved.with_settings({"compile": False}), overfit_steps=overfit_steps)
    for result in checklist.run():
        results.append(result)
        for line in result.lines():
            LOGGER.info(line)
    counts = {status: sum(result.status == status for result in results) for status in ("pass", "warn", "fail")}
    LOGGER.info(f"preflight: {counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed")
    if folder is not None and global_rank() == 0:
        _write(folder, results, checklist, partial(write_page, about=describe_command(resolved)))
    return ExitCode.CHECK_FAILED if counts["fail"] else ExitCode.FINISHED


class Checklist:
    """All checks of one config; failures of earlier checks explain those of later ones.

    Args:
        resolved: Checked run, without compilation, which would take too long; nothing is written to its folder.
        overfit_steps: Optimizer steps on one micro-batch.

    Attributes:
        shown: Samples as text.
        images: Samples as images [C, H, W] with their class or numbers; empty for text.
    """

    def __init__(self, resolved: ResolvedRun, *, overfit_steps: int) -> None:
        self._resolved = resolved
        self._overfit_steps = overfit_steps
        self.shown: list[str] = []
        self.images: list[tuple[Any, str]] = []

    def run(self) -> Iterator[Result]:
        """Yield the results. Collective: every rank runs all checks."""
        data = self._resolved.make("data")
        prepare_with(data, None)
        in_data = []
        for result in self._check_data(data):
            in_data.append(result)
            yield result
        unusable = (data_checks.READABLE, data_checks.RANGE, data_checks.NUMBERS)
        if any(result.check in unusable and result.status == "fail" for result in in_data):
            return  # training would end there; a loss over such targets kills the process, on a GPU without a message
        if self._resolved.config["rollout"]:
            yield from self._check_policy()
            return
        gradients, probe = GradientProbe(), _FirstBatch(self._expected())
        # three steps: a residual branch whose last factor starts at 0 gets its first gradient in the second step
        run = take_steps(self._resolved, num_steps=3, callbacks=[gradients, probe])
        yield from probe.results
        yield check_frozen(gradients)
        yield check_gradients(gradients, sees_differences_only=run.task.loss.sees_differences_only)
        yield check_optimizer(gradients, run.task.optimized_parameters)
        size = run.accumulation.micro_batch_size
        num_new, position = run.data.count_new_samples(), run.data.position  # after the three steps above
        loader_seconds, digests = draw(run, num_batches=_DRAWN)
        num_reads = getattr(run.data.source.train(), "num_reads", 1)
        yield data_checks.check_repeats(digests, num_new - position % num_new, num_reads=num_reads)
        del run
        yield check_accumulation(self._resolved, micro_batch_size=size)
        yield check_precision(self._resolved, micro_batch_size=size)
        learned, step_seconds = overfit(self._resolved, num_steps=self._overfit_steps, micro_batch_size=size)
        yield learned
        yield check_loader(loader_seconds, step_seconds=step_seconds, num_workers=self._resolved.num_workers)
        yield check_checkpoint(self._resolved, micro_batch_size=size)

    def _check_policy(self) -> Iterator[Result]:
        """Yield the results of a policy, whose samples are completions of its own."""
        gradients, probe = GradientProbe(), RolloutProbe()
        run = take_steps(self._resolved, num_steps=3, callbacks=[gradients, probe])
        yield from check_rollouts(probe)
        yield check_frozen(gradients)
        if all(each.no_spread_fraction == 1 for each in probe.rollouts):
            found = "rewards that never differ within a group give none, see above"
            yield Result(check="every parameter has a gradient", status="skip", found=found)
        else:
            yield check_gradients(gradients, sees_differences_only=run.task.loss.sees_differences_only)
        yield check_optimizer(gradients, run.task.optimized_parameters)
        found = "completions are sampled anew by each trial, and the loss of a policy lies around 0 whatever it learns"
        yield Result(check="checks that compare losses", status="skip", found=found)

    def _expected(self) -> Expected:
        resolved = self._resolved
        return Expected(
            num_classes=resolved.model.num_classes,
            starts_trained=resolved.model.pretrained is not None or resolved.start_from is not None,
            in_float8=resolved.precision == "fp8-mixed",
        )

    def _check_data(self, source: DataSource) -> Iterator[Result]:
        train: Any = source.train()
        val = source.val()
        is_text = source.sample_kind == "tokens"
        num_samples = _SAMPLES if is_text else 2 * _SAMPLES
        if hasattr(train, "find_bad"):  # encoded images, each of which takes milliseconds and a megabyte
            num_samples = min(num_samples, max(1, _MAX_VALUES // train.num_values))
            readable = self._check_readable(source, num_samples)
            yield readable
            if readable.status == "fail":
                return
        indices = data_checks.spread_indices(train, num_samples)
        samples = [train[index] for index in indices]
        tokenizer = source.tokenizer
        read = data_checks.draw_each(train, indices[:_SHOWN], seed=self._resolved.seed)
        decode = None if tokenizer is None else tokenizer.decode
        names = getattr(source, "class_names", None)
        self.shown = data_checks.show_samples(read[:2], decode, is_text=is_text, names=names)
        if source.sample_kind == "images":
            self.images = [
                (sample["inputs"], data_checks.describe_targets(sample["targets"], names).removeprefix("class "))
                for sample in read
            ]
        elif source.sample_kind == "images_and_text":
            self.images = [(sample["inputs"], data_checks.describe_caption(sample, decode)) for sample in read]
        for line in self.shown:
            yield Result(check="what the model reads", status="look", found=line)
        if has_draws(train):
            yield data_checks.check_draws(train, seed=self._resolved.seed)
        if self._resolved.task.num_views > 1:
            found = "the task compares views, and reads no labels"
            yield Result(check="targets of the data", status="skip", found=found)
        elif "caption" in samples[0]:
            yield data_checks.check_captions(samples)
        elif "targets" in samples[0]:
            yield from self._check_targets(source, samples)
        else:
            found = "what is learned is generated while the run goes"
            yield Result(check="targets of the data", status="skip", found=found)
        if hasattr(source, "count_classes") and (of_each := source.count_classes()):
            yield data_checks.check_balance(of_each)
        num_seen = 8 * _SAMPLES if num_samples >= _SAMPLES else num_samples
        seen, held_out = data_checks.digest_each(train, num_seen), data_checks.digest_each(val, num_samples)
        is_complete = len(seen) == len(train) and len(held_out) == len(val)
        yield data_checks.check_splits(seen, held_out, is_complete=is_complete)

    def _check_readable(self, source: DataSource, num_samples: int) -> Result:
        bad: list[tuple[str, str]] = []
        num_tried = 0
        for split in (source.train(), source.val()):
            dataset: Any = split
            indices = data_checks.spread_indices(dataset, num_samples)
            num_tried += len(indices)
            bad += dataset.find_bad(indices)
        skips = self._resolved.config["data"]["on_bad_image"] == "skip"
        return data_checks.check_readable(bad, num_tried, skips=skips)

    def _check_targets(self, source: DataSource, samples: Sequence[Any]) -> Iterator[Result]:
        is_text = source.sample_kind == "tokens"
        if is_text:
            yield data_checks.check_shift(samples[:64])
        num_outputs, kind = self._expected().num_classes, self._resolved.target_kind
        one = "image" if source.sample_kind == "images" else "sample"
        if num_outputs is None:
            found = "the model has no setting num_classes, and its outputs are not known before it runs"
            check = data_checks.RANGE if kind == "classes" else data_checks.NUMBERS
            yield Result(check=check, status="skip", found=found)
        elif kind == "classes" or is_text:
            yield data_checks.check_range(samples, num_outputs)
        else:
            yield data_checks.check_numbers(samples, num_outputs, are_labels=kind != "values")
        if not is_text and len({sample["inputs"].shape for sample in samples}) > 1:
            found = "the inputs have different shapes, and cannot be compared"
            yield Result(check="inputs are predictive of targets", status="skip", found=found)
        elif kind == "classes":
            yield data_checks.check_dependence(samples, is_text=is_text, kind=one)
        elif is_text:
            found = "answers are compared as a whole"
            yield Result(check="inputs are predictive of targets", status="skip", found=found)
        else:
            yield data_checks.check_similarity(samples, kind=one)


class _FirstBatch(Callback):
    """Runs the model checks on the first micro-batch, before the first step."""

    def __init__(self, expected: Expected) -> None:
        self.results: list[Result] = []
        self._expected = expected

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.results:
            return

        def mean_over_ranks(value: float) -> float:
            total = get_engine(trainer).sum_over_ranks(torch.tensor(value, dtype=torch.float64))
            return float(total) / trainer.world_size

        self.results = list(
            check_model(
                pl_module,
                batch,
                self._expected,
                context=trainer.precision_plugin.forward_context,
                mean_over_ranks=mean_over_ranks,
            )
        )


def _write(folder: Path, results: Sequence[Result], checklist: Checklist, write_page: Callable[..., None]) -> None:
    record = [asdict(result) for result in results]
    write_atomically(folder / "preflight.json", json.dumps({"results": record}, indent=2) + "\n")
    images = [(image.float().tolist(), label) for image, label in checklist.images]
    write_page(folder / "preflight.html", record, images)
    LOGGER.info(str(folder / "preflight.html"))
