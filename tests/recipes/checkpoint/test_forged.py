"""Checkpoints that are whole by their hashes, and yet are none that a run wrote: each is one error that names it."""

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from support import composed_config, resolved

from recipes.build import build
from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.manifest import find_fault, hash_file
from recipes.checkpoint.rng_state import read_states, rng_state
from recipes.checkpoint.saved_tensor import open_tensors
from recipes.checkpoint.shard_file import write_shard
from recipes.checkpoint.shards import unsharded_part
from recipes.checkpoint.writer import CheckpointWriter
from recipes.errors import ConfigError
from recipes.mode.fit import fit

State = dict[str, Any]
NAME = "step_0000020.ckpt"


@pytest.fixture(scope="module")
def run_folder(train: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("forged") / "run"
    assert train(folder).exit_code == 0
    shutil.rmtree(folder / "checkpoints/step_0000010.ckpt")
    return folder


@pytest.fixture
def forged(run_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run_folder, tmp_path / "run", symlinks=True)


def forge_manifest(run: Path, change: Callable[[State], object] = lambda fields: None) -> Path:
    """Change the fields of a manifest, with the true sizes and hashes of its files and its own."""
    checkpoint = run / "checkpoints" / NAME
    fields = json.loads((checkpoint / "manifest.json").read_text())
    [own_hash] = [key for key in fields if key.startswith("hash_of")]
    del fields[own_hash]
    for name in fields["files"]:
        path = checkpoint / name
        fields["files"][name] = {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
    change(fields)
    text = json.dumps(fields, indent=2) + "\n"
    fields[own_hash] = xxhash.xxh3_128_hexdigest(text.encode())
    (checkpoint / "manifest.json").write_text(json.dumps(fields, indent=2) + "\n")
    return checkpoint


def forge_state(run: Path, change: Callable[[State], object]) -> Path:
    path = run / "checkpoints" / NAME / "run.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    return forge_manifest(run)


def forge_header(run: Path, change: Callable[[State, State], object]) -> Path:
    """Change the header of a shard, given with its metadata parsed."""
    path = run / "checkpoints" / NAME / "rank_00000.safetensors"
    content = path.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = {key: json.loads(value) for key, value in header["__metadata__"].items()}
    change(header, metadata)
    header["__metadata__"] = {key: json.dumps(value) for key, value in metadata.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return forge_state(run, lambda state: state.pop("tensors"))  # which earlier versions did not write


def forge_tensors(run: Path, change: Callable[[State], object], *, lists_them: bool = False) -> Path:
    """Change the tensors of a shard, and whether its metadata lists what is left alone."""
    path = run / "checkpoints" / NAME / "rank_00000.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
        listed = {key: json.loads(value) for key, value in file.metadata().items()}
    change(tensors)
    if lists_them:
        listed = {key: {name: of[name] for name in of if name in tensors} for key, of in listed.items()}
    save_file(tensors, path, metadata={key: json.dumps(value) for key, value in listed.items()})
    return forge_manifest(run)


def get_steps(state: State) -> State:
    """Return Lightning's count of optimizer steps."""
    loop = state["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    steps: State = loop["optimizer"]["step"]["total"]
    return steps


def remove(start: str) -> Callable[[State], object]:
    def change(tensors: State) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    return change


def load(checkpoint: Path) -> None:
    writer = CheckpointWriter(async_save=False, after=lambda folder: None)
    FolderCheckpointIO(writer=writer, verify_hashes=True).load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "20"),
        ("step", 10**30),
        ("step", 99),
        ("world_size", 0),
        ("strategy", None),
        ("versions", 3),
    ]
    + [("metrics", value) for value in ({"val/loss": "x"}, {"val/loss": None}, {"val/loss": 10**400}, [1])]
    + [("ended", value) for value in (3, {}, {"by": "x", "why": "y", "settings": []})],
)
def test_a_manifest_with_other_values_is_damaged(key: str, value: Any, forged: Path) -> None:
    assert find_fault(forged / "checkpoints" / NAME) is None
    checkpoint = forge_manifest(forged, lambda fields: fields.update({key: value}))
    assert str(find_fault(checkpoint)).startswith("its manifest.json ")


@pytest.mark.parametrize("key", ["global_step", "parameters", "optimizer_states", "tied"])
def test_a_state_without_what_its_tensors_need_is_an_error(key: str, forged: Path) -> None:
    checkpoint = forge_state(forged, lambda state: state.pop(key))
    with pytest.raises(ConfigError, match=rf"cannot be read: KeyError: '{key}'"):
        load(checkpoint)


def test_a_state_without_a_hash_is_not_loaded(forged: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.pt cannot be read: its manifest does not list it"):
        load(forge_manifest(forged, lambda fields: fields["files"].clear()))


def test_no_object_of_a_pickle_is_built(forged: Path) -> None:
    (forged / "checkpoints" / NAME / "run.pt").write_bytes(b"cbuiltins\nprint\n(Vcode\ntR.")
    with pytest.raises(ConfigError, match=r"run\.pt cannot be read: it "):
        load(forge_manifest(forged))


@pytest.mark.parametrize(
    ("offsets", "shape"), [([-1, 0], None), ([5, 0], None), ([0, 0], [1]), ("ab", None), ([0, 0], [-1, 3])]
)
def test_a_shard_lies_within_its_tensor(offsets: Any, shape: Any, forged: Path) -> None:
    def change(header: State, metadata: State) -> None:
        name = next(name for name in header if name.startswith("model."))
        metadata["DCP_SHARDING_INFO"][name] = {"saved_offsets": offsets}
        metadata["unsharded_shapes"][name] = shape or metadata["unsharded_shapes"][name]

    with pytest.raises(ConfigError, match=rf"{NAME} cannot be read: "):
        load(forge_header(forged, change))


def resume(run: Path, overrides: list[str], **model: Any) -> None:
    """Resume in this process for a step, with settings of the model that nobody has typed."""
    config = composed_config(*overrides, f"resume={run}", "trainer.max_steps=21", f"hydra.run.dir={run}")
    fit(build(resolved(config | {"model": config["model"] | model}, run)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda state: state["loops"]["fit_loop"].clear(),
            "KeyError: 'epoch_loop.automatic_optimization.optim_progress'",
        ),
        (lambda state: state.update(lr_schedulers=[]), "it has the state of 0 schedules of the learning rate, not 1"),
        (lambda state: state.pop("StreamDataModule"), "it lacks StreamDataModule"),  # the position in the data
        (lambda state: state["callbacks"].update({key: {"x": 1} for key in state["callbacks"]}), "KeyError: "),
        (lambda state: state["consumed"].update(samples=-8), "consumed samples is -8, not a count"),
        (lambda state: state["lr_schedulers"][0].update(last_epoch="a"), "the step of the schedule is a, not a count"),
        (
            lambda state: state["lr_schedulers"][0].update(last_epoch=2),
            "the schedule is at step 2, and the run at step 20",
        ),
        (lambda state: get_steps(state).update(completed=2), "the optimizer is at step 2, and the run at step 20"),
        (lambda state: state["StreamDataModule"].update(position=-1), "the position in the data is -1, not a count"),
    ],
)
def test_what_restoring_a_state_raises_is_an_error_in_the_checkpoint(
    change: Any, reason: str, forged: Path, overrides: list[str]
) -> None:
    checkpoint = forge_state(forged, change)
    rows = (forged / "metrics.csv").read_bytes()
    with pytest.raises(ConfigError) as raised:
        resume(forged, overrides)
    assert raised.value.setting == f"resume={checkpoint}"
    assert raised.value.reason.startswith(f"{checkpoint} cannot be read: ")
    assert reason in raised.value.reason
    assert (forged / "metrics.csv").read_bytes() == rows


@pytest.mark.parametrize("start", ["optimizer/", "optimizer/exp_avg_sq/model.blocks.0", "model.norm", "rng/0/cpu"])
@pytest.mark.parametrize(("lists_them", "reason"), [(False, "lists {}, and does not hold it"), (True, "it lacks {}")])
def test_a_tensor_that_was_saved_is_not_begun_again(start: str, lists_them: bool, reason: str, forged: Path) -> None:
    checkpoint = forge_tensors(forged, remove(start), lists_them=lists_them)
    with pytest.raises(ConfigError, match=reason.format(rf"{start}\S*")) as raised:
        load(checkpoint)
    assert raised.value.setting == f"resume={checkpoint}"


def test_a_tensor_of_another_shape_or_dtype_than_was_saved_is_not_loaded(forged: Path) -> None:
    def change(tensors: State) -> None:
        name = next(name for name in tensors if name.startswith("optimizer/exp_avg/"))
        tensors[name] = tensors[name].half()

    with pytest.raises(ConfigError, match=r"exp_avg/\S+ is F16 of \[.*\], and was saved as F32 of \["):
        load(forge_tensors(forged, change))


@pytest.mark.parametrize(
    ("start", "factor", "reason"),
    [
        ("model.", float("nan"), "holds NaN or inf"),
        ("optimizer/exp_avg/", float("inf"), "holds NaN or inf"),
        ("optimizer/exp_avg_sq/", -1.0, "holds negative numbers"),
        ("optimizer/step/", -1.0, "holds negative numbers"),
    ],
)
def test_values_that_no_run_saves_are_not_trained_with(
    start: str, factor: float, reason: str, forged: Path, overrides: list[str]
) -> None:
    def change(tensors: State) -> None:
        for name in tensors:
            if name.startswith(start):
                tensors[name] = tensors[name] * factor

    checkpoint = forge_tensors(forged, change)
    with pytest.raises(ConfigError, match=rf"{start}\S+ {reason}") as raised:
        resume(forged, overrides)
    assert raised.value.setting == f"resume={checkpoint}"


def test_weights_of_another_kind_of_number_are_not_cast(forged: Path, overrides: list[str]) -> None:
    def change(header: State, metadata: State) -> None:
        for name in header:
            if name.startswith("model."):
                header[name]["dtype"] = "I32"

    forge_header(forged, change)
    with pytest.raises(ConfigError, match=r"is torch\.int32 in it, and torch\.float32 in the model"):
        resume(forged, overrides)


@pytest.mark.parametrize(("dtype", "name"), [("I32", "exp_avg"), ("U32", "exp_avg_sq"), ("I32", "step")])
def test_optimizer_state_of_another_kind_of_number_is_not_cast(
    dtype: str, name: str, forged: Path, overrides: list[str]
) -> None:
    def change(header: State, metadata: State) -> None:
        changed = next(key for key in header if key.startswith(f"optimizer/{name}/"))
        header[changed]["dtype"] = dtype

    forge_header(forged, change)
    with pytest.raises(ConfigError, match=rf"{name} of model\.\S+ is {dtype} in it, not F32"):
        resume(forged, overrides)


@pytest.mark.parametrize(
    ("source", "change", "reason"),
    [
        ("numpy", lambda tensor: tensor[:5], r"random numbers of numpy is \[5\] of torch.int64"),
        ("numpy", lambda tensor: tensor.double(), r"random numbers of numpy is \[627\] of torch.float64"),
        # numpy itself takes it, and reads beyond the keys
        ("numpy", lambda tensor: tensor.index_fill(0, torch.tensor(624), 9999), "numpy is at position 9999 of 624"),
        ("python", lambda tensor: tensor.neg(), r"OverflowError|ValueError"),
        ("cpu", lambda tensor: tensor[:7], "RuntimeError: "),
    ],
)
def test_a_state_of_random_numbers_is_tried_before_anything_is_restored(
    source: str, change: Any, reason: str, tmp_path: Path
) -> None:
    states = {key: part.tensor for key, part in rng_state().items()}
    before = random.getstate(), torch.get_rng_state().tolist()
    parts = {key: unsharded_part(tensor.clone()) for key, tensor in states.items()}
    parts[source] = unsharded_part(change(states[source]))
    write_shard(tmp_path / "rank_00000.safetensors", parts)
    saved = open_tensors([tmp_path / "rank_00000.safetensors"])
    with pytest.raises(Exception) as raised:
        read_states([saved], rank=0, world_size=1)
    assert re.search(reason, f"{type(raised.value).__name__}: {raised.value}")
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_a_state_of_random_numbers_is_read_where_errors_are_those_of_the_checkpoint(
    forged: Path, overrides: list[str]
) -> None:
    def change(header: State, metadata: State) -> None:
        header["rng/0/numpy"]["dtype"] = "F64"

    checkpoint = forge_header(forged, change)
    with pytest.raises(ConfigError) as raised:
        resume(forged, overrides)
    assert raised.value.reason.startswith(f"{checkpoint} cannot be read: ValueError: the state of the random numbers")


def test_a_resume_computes_what_its_weights_were_trained_for(forged: Path, overrides: list[str]) -> None:
    # as after an edit of config.yaml: no shape changes
    with pytest.raises(
        ConfigError, match=r"the weights of the checkpoint were trained with model\.num_heads=2"
    ) as raised:
        resume(forged, overrides, num_heads=4)
    assert raised.value.setting == "resume=… with model.num_heads=4"
    typed = "the model= and model.… that it was trained with"
    assert raised.value.fix == f"resume=… with {typed}, or the config.yaml of its run in {forged}"
