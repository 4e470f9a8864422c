"""A checkpoint holds plain data and tensors, is loaded bit for bit, and is found by what `resume=` says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.resume import (
    find_checkpoint,
    get_fallbacks,
    names_checkpoint,
    newest_checkpoint,
    read_step,
)
from recipes.checkpoint.retention import checkpoint_name
from recipes.checkpoint.rng_state import rng_state
from recipes.checkpoint.shards import unsharded_part
from recipes.checkpoint.writer import CheckpointWriter
from recipes.errors import ConfigError

SaveAt = Callable[[Path, int], Path]
WEIGHT = torch.arange(6.0).reshape(3, 2)


def make_io() -> FolderCheckpointIO:
    writer = CheckpointWriter(async_save=False, after=lambda folder: None)
    return FolderCheckpointIO(writer=writer, verify_hashes=True)


def state(step: int) -> dict[str, Any]:
    """Return what Lightning passes on for a model with two names for one weight."""
    weight = unsharded_part(WEIGHT + step)
    moment = {
        "exp_avg": unsharded_part(WEIGHT * 2),
        "step": unsharded_part(torch.tensor(float(step))),
    }
    return {
        "global_step": step,
        "strategy": "SingleDevice",
        "state_dict": {"embedding": weight, "head": weight},
        "tied": {"head": "embedding"},
        "parameters": ["embedding"],
        "group_values": [{}],
        "optimizer_states": [{"state": {0: moment}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "rng": rng_state(),
        "callbacks": {"meter": {"seen": 3, "best": None}},
    }


@pytest.fixture
def save_at() -> SaveAt:
    """Return a function that saves one step of a run."""

    def run(run_folder: Path, step: int) -> Path:
        path = run_folder / "checkpoints" / checkpoint_name(step)
        io = make_io()
        io.save_checkpoint(state(step), path)
        outcome = io.writer.poll(wait=True)
        assert outcome is not None
        assert outcome.is_valid, outcome
        return path

    return run


def test_a_saved_checkpoint_is_loaded_bit_for_bit(tmp_path: Path, save_at: SaveAt) -> None:
    path = save_at(tmp_path, 7)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["last", "step_0000007.ckpt"]
    assert sorted(entry.name for entry in path.iterdir()) == [
        "manifest.json",
        "rank_00000.safetensors",
        "run.pt",
    ]
    loaded = make_io().load_checkpoint(path)
    assert loaded["global_step"] == 7
    assert loaded["callbacks"] == {"meter": {"seen": 3, "best": None}}
    assert loaded["state_dict"].keys() == {"embedding", "head"}
    assert torch.equal(loaded["state_dict"]["head"].read(), WEIGHT + 7)
    [optimizer] = loaded["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert torch.equal(optimizer["state"][0]["exp_avg"].read(), WEIGHT * 2)
    assert float(optimizer["state"][0]["step"].read()) == 7
    assert torch.equal(loaded["rng"][0]["cpu"].read(), torch.get_rng_state())


def test_run_pt_loads_with_weights_only_and_holds_no_tensor(tmp_path: Path, save_at: SaveAt) -> None:
    def leaves(node: Any) -> list[Any]:
        if isinstance(node, dict):
            return [leaf for value in node.values() for leaf in leaves(value)]
        if isinstance(node, list | tuple):
            return [leaf for value in node for leaf in leaves(value)]
        return [node]

    plain = torch.load(save_at(tmp_path, 7) / "run.pt", weights_only=True)
    assert plain["optimizer_states"] == [{"param_groups": [{"lr": 0.1, "params": [0]}]}]
    assert {type(leaf) for leaf in leaves(plain)} <= {int, float, str, bool, type(None)}


def test_resume_finds_the_newest_checkpoint_the_named_one_or_none(tmp_path: Path, save_at: SaveAt) -> None:
    first, second = save_at(tmp_path, 10), save_at(tmp_path, 20)
    (tmp_path / "checkpoints" / "step_0000030.ckpt.tmp").mkdir()
    (tmp_path / "checkpoints" / "abandoned_0000040_1").mkdir()
    elsewhere = tmp_path / "elsewhere"
    assert find_checkpoint(None, tmp_path) is None
    assert find_checkpoint("auto", tmp_path) == second
    assert find_checkpoint("auto", elsewhere) is None
    assert find_checkpoint(str(tmp_path), elsewhere) == second
    assert find_checkpoint(str(first), tmp_path) == first
    assert find_checkpoint(str(tmp_path / "checkpoints/last"), elsewhere) == second
    for missing in (elsewhere, tmp_path / "checkpoints" / checkpoint_name(30)):
        with pytest.raises(ConfigError, match="it is not a valid checkpoint: there is no such folder"):
            find_checkpoint(str(missing), tmp_path)


def test_a_named_run_folder_without_a_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert find_checkpoint("auto", tmp_path) is None
    with pytest.raises(ConfigError, match="it holds no valid checkpoint"):
        find_checkpoint(str(tmp_path), tmp_path)


def test_names_checkpoint_is_true_for_a_checkpoint_and_false_for_a_run_folder(tmp_path: Path, save_at: SaveAt) -> None:
    path = save_at(tmp_path, 10)
    assert names_checkpoint(str(path))
    assert names_checkpoint(str(path.parent / "last"))
    assert not names_checkpoint(str(tmp_path))
    assert not names_checkpoint("auto")
    assert not names_checkpoint(None)


def test_fallbacks_are_the_earlier_checkpoints_newest_first_then_the_later_ones(
    tmp_path: Path, save_at: SaveAt
) -> None:
    paths = {step: save_at(tmp_path, step) for step in (10, 20, 30, 40, 50)}
    assert [read_step(path) for path in get_fallbacks(paths[30])] == [20, 10, 50, 40]
    assert [read_step(path) for path in get_fallbacks(paths[50])] == [40, 30, 20, 10]
    assert newest_checkpoint(tmp_path) == paths[50]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\0" * 1900, "its manifest.json is damaged"),
        (None, "its manifest.json is missing"),
        (b'{"format": 1}', "its manifest.json is damaged"),
        (b"renamed", "its manifest.json is of step 20"),
    ],
)
def test_the_newest_checkpoint_is_rejected_with_a_reason_if_its_manifest_is_invalid(
    content: bytes | None, reason: str, tmp_path: Path, save_at: SaveAt, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = save_at(tmp_path, 10), save_at(tmp_path, 20)
    if content == b"renamed":
        second = second.rename(second.with_name(checkpoint_name(90)))
    else:
        (second / "manifest.json").unlink()
        if content is not None:
            (second / "manifest.json").write_bytes(content)
    (tmp_path / "checkpoints/step_0000030.ckpt.tmp").mkdir()  # left by a killed save: no checkpoint at all
    found = find_checkpoint("auto", tmp_path)
    assert found == first
    io = make_io()
    io.falls_back = True
    with caplog.at_level("INFO", logger="lightning_recipes"):
        assert io.find_valid(found) == first
        assert io.find_valid(found) == first
    assert io.rejected == [(second, reason)]
    assert caplog.messages == [f"Rejected {second}: {reason}"]


def test_a_checkpoint_of_a_later_version_is_not_passed_over(tmp_path: Path, save_at: SaveAt) -> None:
    first, second = save_at(tmp_path, 10), save_at(tmp_path, 20)
    path = second / "manifest.json"
    fields = json.loads(path.read_text()) | {"format": 99}
    del fields["hash_of_this_file_without_this_line"]
    own_hash = xxhash.xxh3_128_hexdigest(f"{json.dumps(fields, indent=2)}\n".encode())
    path.write_text(json.dumps(fields | {"hash_of_this_file_without_this_line": own_hash}, indent=2) + "\n")
    with pytest.raises(ConfigError, match="it has format 99, which this version does not load") as mistake:
        find_checkpoint(str(tmp_path), tmp_path)
    assert mistake.value.fix == f"resume={first}, to go on from step 10"
    assert find_checkpoint(str(first), tmp_path) == first


def test_removing_a_checkpoint_leaves_nothing_of_it(tmp_path: Path, save_at: SaveAt) -> None:
    first, second = save_at(tmp_path, 10), save_at(tmp_path, 20)
    make_io().remove_checkpoint(first)
    assert sorted(path.name for path in second.parent.iterdir()) == ["last", second.name]
