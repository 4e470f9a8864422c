"""Show what a step was trained on: a spike from its dump, any other step from its batch, which is read again.

A spike is recomputed with the same batch, weights and RNG state, and per-block gradient norms. The batch of any other
step follows from the seed and the position in the data; the losses of its samples are those of the newest checkpoint
before it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from recipes.build import Run
from recipes.checkpoint.layout import is_shard
from recipes.checkpoint.manifest import find_fault
from recipes.checkpoint.retention import steps_on_disk
from recipes.checkpoint.saved_tensor import open_tensors
from recipes.checkpoint.shards import load_module
from recipes.config.traits import declare_mode
from recipes.engine import get_engine
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.foreign_file import FormatError, reading
from recipes.loss import divide, logged_by_count, sum_by_count
from recipes.mode.load import load_task, restoring
from recipes.run_folder import (
    CHECKPOINTS,
    EVENTS_FILE,
    SPIKES_FOLDER,
    claim_output,
    read_events,
    read_json,
    read_json_lines,
)
from recipes.runtime.console import LOGGER
from recipes.strategy.torch_native import global_norm
from recipes.task.base import TrainingTask

SHOWN_SAMPLES = 5
_ANOTHER_RUN = "mode.step=<any step of this run>, or resume=<a run that had a spike>"
_BLOCK = re.compile(r"^(.*?\d+)\.")  # up to the first number
_VALUES_FILE, _SAMPLES_FILE = "spike.json", "samples.jsonl"
_REPLAYED_FILE = "replayed_step_{:07d}.jsonl"
_OF_A_LINE = '{"position": '  # begins each line of it
_SHOWN_VALUES = 4


@declare_mode(needs_checkpoint=True, reads_data=True, writes="spikes")
def replay(run: Run, *, step: Annotated[int, ">= 1"] | None) -> int:
    """Recompute a step from its dump, or read its batch again, and print its samples.

    With a dump, the recorded values are printed, too, and `replay.json` is written into it. Without one, the samples of
    the global batch are written to `replayed_step_….jsonl` in the run folder, the largest losses first.

    Args:
        run: A run with a checkpoint; the dump is in the folder of the run that wrote it.
        step: Optimizer step, counted from 1; None is the newest dump.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: The run has no such step, its dump is damaged, the folder cannot be written to, or there is no
            checkpoint.
    """
    if step is not None and run.checkpoint is not None:
        folder = run.checkpoint.parents[1]
        if not (folder / SPIKES_FOLDER / f"step_{step:07d}" / _VALUES_FILE).is_file():
            _replay_from_data(run, folder, step)
            return 0
    task, checkpoint = load_task(run, "trained")
    dump, others = _find_dump(checkpoint.parents[1] / SPIKES_FOLDER, step)
    claim_output(dump, "resume")
    fix = f"mode.step={others[-1]}" if others else _ANOTHER_RUN
    with restoring(run, dump, setting=f"mode.step={_get_step(dump)}", fix=fix):
        result = _replay(run, task, dump, checkpoint, fix)
    write_atomically(dump / "replay.json", json.dumps(result, indent=2) + "\n")
    return 0


def _replay_from_data(run: Run, folder: Path, step: int) -> None:
    """Read the global batch of a step again, and print and write its samples with their losses."""
    if step > run.trainer.max_steps > 0:
        last = run.trainer.max_steps
        raise ConfigError(f"mode.step={step}", f"the run has {last} steps", f"mode.step={last}")
    path = folder / _REPLAYED_FILE.format(step)
    claim_output(path, "resume", is_file=True, replaces=lambda text: text.startswith(_OF_A_LINE))
    run.data.trainer = run.trainer
    run.data.prepare_data()
    before = {at: path for at, path in steps_on_disk(folder / CHECKPOINTS).items() if at < step}
    valid = [path for path in reversed(before.values()) if find_fault(path) is None]
    if valid:
        task, checkpoint = load_task(replace(run, checkpoint=valid[0]), "trained", moves_data=True)
        first_step, weights = int(checkpoint.name[5:-5]), f"of {checkpoint.name}"
    else:
        task, checkpoint, first_step = _initialize(run), None, 0
        weights = "that the run began with, as no checkpoint before it is left"
    anchor, position = _find_anchor(folder, checkpoint, first_step, step) or (first_step, run.data.position)
    samples_per_step = run.data.global_batch_size
    position += (step - anchor) * samples_per_step
    run.data.move_to(position - samples_per_step)
    samples = run.data.samples_of_step(position)
    losses, contents = _read_samples_again(run, task)
    for sample, loss, content in zip(samples, losses, contents, strict=True):
        sample |= {"loss": _finite(loss)} | content
    samples.sort(key=lambda sample: -math.inf if sample["loss"] is None else -sample["loss"])
    write_atomically(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    mean = math.fsum(losses) / len(losses)
    LOGGER.info(
        f"step {step}: samples {position - samples_per_step:,} to {position - 1:,} of the stream, with the weights"
        f" {weights}, without dropout: mean loss of a sample {mean:.6g}"
    )
    for sample in samples[:SHOWN_SAMPLES]:
        _print_sample(sample)
    more = f"all {len(samples)} samples" if len(samples) > SHOWN_SAMPLES else "the same"
    LOGGER.info(f"{more}, the largest losses first: {path}")


def _initialize(run: Run) -> TrainingTask:
    """Return the run's task with the weights that it began with, in eval mode."""
    task = run.task
    task.trainer = run.trainer
    task.awaits_checkpoint = False
    if task.start is not None:
        task.first_weights = task.start
    with run.trainer.precision_plugin.module_init_context():
        task.configure_model()
    return task.eval()


def _find_anchor(folder: Path, checkpoint: Path | None, first_step: int, step: int) -> tuple[int, int] | None:
    """Return the last step before this one that the run was rolled back to, and the position of the data there.

    Args:
        folder: The run folder.
        checkpoint: Whose position is known; None: that of the beginning.
        first_step: Its step.
        step: The step whose batch is wanted.

    Returns:
        None: no rollback lies between the checkpoint and the step.

    Raises:
        ConfigError: The event of that rollback has no position.
    """
    anchors: list[tuple[int, int | None]] = []
    for event in read_events(folder / EVENTS_FILE):
        if event["event"] == "checkpoint" and checkpoint is not None and event.get("path") == checkpoint.name:
            anchors = []  # of the state that was saved
        elif event["event"] == "resume":
            anchors = [anchor for anchor in anchors if anchor[0] <= event["step"]]
        elif event["event"] == "rollback":
            anchors.append((event["step"], event.get("position")))
    found = [anchor for anchor in anchors if first_step <= anchor[0] < step]
    if not found:
        return None
    anchor, position = found[-1]
    if type(position) is not int or position < 0:
        raise ConfigError(
            f"mode.step={step}",
            f"the run was rolled back to step {anchor}, and {EVENTS_FILE} does not say where in the data it went on",
            f"mode.step={max(1, anchor)}, or a step after a later checkpoint",
        )
    return anchor, position


@torch.no_grad()
def _read_samples_again(run: Run, task: TrainingTask) -> tuple[list[float], list[dict[str, Any]]]:
    """Return loss and content of each sample of the global batch that comes next, in the order of the stream."""
    engine, plugin = get_engine(run.trainer), run.trainer.precision_plugin
    batches = islice(run.data.train_dataloader(), run.data.num_micro_batches)
    window = [engine.batch_to_device(plugin.convert_input(batch)) for batch in batches]
    losses: list[float] = []
    contents: list[dict[str, Any]] = []
    with plugin.forward_context():
        for batch in task.before_window(window) if task.looks_ahead else window:
            of_batch = task.recipes_sample_losses(batch).float().tolist()
            losses += of_batch
            contents += [_describe_content(run, batch, sample, of_batch) for sample in range(len(of_batch))]
    return losses, contents


def _describe_content(run: Run, batch: Mapping[str, Any], sample: int, losses: Sequence[float]) -> dict[str, Any]:
    """Return what a sample is: its text as it was packed and cut, or the shapes of its tensors and its targets.

    A sample may have several rows: the answers of a pair.
    """
    tokenizer = run.data.source.tokenizer
    if tokenizer is not None and "inputs" in batch:
        inputs, num_inputs = batch["inputs"], batch.get("num_inputs")
        num_rows = len(inputs) // len(losses)
        rows = range(sample * num_rows, (sample + 1) * num_rows)
        tokens = [inputs[row][: None if num_inputs is None else int(num_inputs[row])].tolist() for row in rows]
        return {"text": "\n\n".join(map(tokenizer.decode, tokens))}
    of_row = {key: value[sample] for key, value in batch.items() if isinstance(value, Tensor) and value.ndim > 0}
    shapes = {key: list(value.shape) for key, value in of_row.items() if key != "targets"}
    targets = {key: of_row[key].flatten()[:_SHOWN_VALUES].tolist() for key in ("targets",) if key in of_row}
    return {"shapes": shapes} | targets


def _replay(run: Run, task: TrainingTask, dump: Path, checkpoint: Path, fix: str) -> dict[str, Any]:
    """Recompute the step of a dump and print it; return the values."""
    setting = f"mode.step={_get_step(dump)}"
    recorded = _read_values(dump, setting, fix)
    samples = _read_samples(dump, setting, fix)
    rank_states = [_read_rank(dump, rank, setting, fix) for rank in range(recorded["world_size"])]
    weights = dump / "weights"
    if weights.is_dir():
        files = [path for path in sorted(weights.iterdir()) if is_shard(path.name) and path.is_file()]
        saved = open_tensors(files, are_checked=False)  # a step may begin with weights that are not finite
        load_module(
            task,
            {
                name: saved.get(name) or _tied_tensor(task, name, saved)
                for name in task.state_dict()
                if name not in task.frozen_names()
            },
        )
    else:
        LOGGER.info(
            "The dump contains no weights: they had already changed when it was written;"
            f" using those of {checkpoint.name}"
        )
    loss, norm_by_block, norm = _recompute(run, task, rank_states)
    _print(recorded, samples, dump, loss, norm, norm_by_block)
    return {"loss": _finite(loss), "grad_norm": _finite(norm), "grad_norms": norm_by_block}


def _find_dump(parent: Path, step: int | None) -> tuple[Path, list[int]]:
    """Return the folder of a step's dump, and the steps of the other dumps."""
    named = [path for path in parent.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    # the file is written last: a folder without it is no dump
    dumps = {_get_step(path): path for path in named if (path / _VALUES_FILE).is_file()}
    steps = sorted(dumps)
    setting = f"mode.step={'null' if step is None else step}"
    if not steps:
        raise ConfigError(setting, f"{parent} contains no dump of a spike", _ANOTHER_RUN)
    wanted = steps[-1] if step is None else step
    if wanted not in dumps:
        listed = ", ".join(map(str, steps))
        reason = f"{parent} contains no dump of that step, only of {listed}"
        raise ConfigError(setting, reason, f"mode.step={steps[-1]}")
    return dumps[wanted], [other for other in steps if other != wanted]


def _get_step(dump: Path) -> int:
    return int(dump.name.removeprefix("step_"))


def _read_values(dump: Path, setting: str, fix: str) -> dict[str, Any]:
    """Return what was recorded of the step."""
    path = dump / _VALUES_FILE
    with reading(path, setting, fix):
        recorded = read_json(path, fix=fix)
        _check_keys(recorded, ("weight_norms", "world_size", "loss", "grad_norm"))
        norms, world_size = recorded["weight_norms"], recorded["world_size"]
        numbers = [recorded["loss"], recorded["grad_norm"], *norms.values()]
        if not all(number is None or type(number) in (int, float) for number in numbers):
            raise FormatError("a loss or norm in it is not a number")
        if type(world_size) is not int or world_size < 1:
            raise FormatError(f"its world_size is {world_size}, not a number of ranks")
    return recorded


def _check_keys(found: Mapping[str, Any], keys: Sequence[str]) -> None:
    if missing := [key for key in keys if key not in found]:
        raise FormatError(f"it has no {missing[0]}")


def _read_rank(dump: Path, rank: int, setting: str, fix: str) -> dict[str, Any]:
    """Return the micro-batches of a rank, with its random numbers before each."""
    path = dump / f"rank_{rank:05d}.pt"
    with reading(path, setting, fix):
        if not path.is_file():  # a FIFO would block
            raise FormatError("it is missing, and the step cannot be recomputed without the micro-batches of this rank")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        _check_keys(state, ("batches", "random"))
        if not state["batches"] or len(state["batches"]) != len(state["random"]):
            raise FormatError("it has no random numbers for each micro-batch")
    return state


def _read_samples(dump: Path, setting: str, fix: str) -> list[dict[str, Any]]:
    """Return the samples of the step, the largest losses first."""
    path = dump / _SAMPLES_FILE
    with reading(path, setting, fix):
        return read_json_lines(path)


def _tied_tensor(task: TrainingTask, name: str, saved: Any) -> Any:
    """Return the saved tensor of the parameter that `name` is tied to."""
    parameters = dict(task.named_parameters(remove_duplicate=False))
    others = [other for other, parameter in parameters.items() if parameter is parameters.get(name) and other in saved]
    if not others:
        raise FormatError(f"its weights lack {name}")
    return saved[others[0]]


def _recompute(
    run: Run, task: TrainingTask, rank_states: list[dict[str, Any]]
) -> tuple[float, dict[str, float | None], float]:
    """Return loss, gradient norm by block and global norm, from the micro-batches of all ranks in turn."""
    device = get_engine(run.trainer).root_device
    task.hold_frozen_models()
    task.train()
    total = 0.0
    for state in rank_states:
        for batch, random_state in zip(state["batches"], state["random"], strict=True):
            torch.set_rng_state(random_state["torch"])
            if random_state["cuda"] is not None and device.type == "cuda":
                torch.cuda.set_rng_state(random_state["cuda"])
            batch = {key: _move(value, device) for key, value in batch.items()}
            with run.trainer.precision_plugin.forward_context():
                terms = task.terms(batch)
            divide(sum_by_count(terms), batch).backward()
            total += float(divide(logged_by_count(terms), batch))
    grads = {name: parameter.grad for name, parameter in task.named_parameters() if parameter.grad is not None}
    grads_by_block: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        grads_by_block.setdefault(_block_name(name), []).append(grad)
    norm_by_block = {block: _finite(float(global_norm(block_grads))) for block, block_grads in grads_by_block.items()}
    return total, norm_by_block, float(global_norm([*grads.values()]))


def _block_name(parameter: str) -> str:
    """Map `model.blocks.3.mlp.weight` to `blocks.3`, and `model.vision.blocks.3.…` to `vision.blocks.3`."""
    name = parameter.removeprefix("model.")
    numbered = _BLOCK.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0]


def _print(
    recorded: dict[str, Any],
    samples: list[dict[str, Any]],
    dump: Path,
    loss: float,
    norm: float,
    norm_by_block: dict[str, float | None],
) -> None:
    before = f"loss {_number(recorded['loss'])}, gradient norm {_number(recorded['grad_norm'])}"
    now = f"loss {loss:.6g}, gradient norm {norm:.6g}"
    LOGGER.info(f"{dump}: recorded {before}; recomputed {now}")
    for block, value in norm_by_block.items():
        weight = recorded["weight_norms"].get(block)
        LOGGER.info(f"  {block:<16} gradient {_number(value):>10}   weights {_number(weight):>10}")
    for sample in samples[:SHOWN_SAMPLES]:
        _print_sample(sample)


def _print_sample(sample: Mapping[str, Any]) -> None:
    documents = ", ".join(
        document["name"] + (f" from token {document['first_token']}" if "first_token" in document else "")
        for document in sample.get("documents", [])
    )
    source = f"sample {sample['sample']}" if "sample" in sample else f"rank {sample['rank']}"
    parts = [source, *([f"of {sample['source']}"] if "source" in sample else []), documents]
    parts += [f"{key} {' x '.join(map(str, shape))}" for key, shape in sample.get("shapes", {}).items()]
    parts += [f"targets {' '.join(map(str, sample['targets']))}"] if "targets" in sample else []
    LOGGER.info(f"  loss {_number(sample['loss']):>10}   {' '.join(part for part in parts if part)}")
    if "text" in sample:
        LOGGER.info(f"    {sample['text'][:100]!r}")


def _move(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _finite(value: float) -> float | None:
    """Return None for NaN and inf, which JSON does not have."""
    return value if math.isfinite(value) else None
