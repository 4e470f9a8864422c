"""mode=replay: a spike, recomputed from its dump on one device."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import FaultAt
from support import TINY, execute, resolved, run_train, write_texts

from recipes.build import build
from recipes.config import compose_and_check
from recipes.config.compose import freeze
from recipes.data.draws import rng_at
from recipes.errors import ConfigError
from recipes.mode.fit import fit
from recipes.mode.replay import replay

OVERRIDES = [
    *(override for override in TINY if not override.startswith("~")),
    "callbacks=[grad_norm,loss_spike]",
    "callbacks.loss_spike.window=16",
    "callbacks.loss_spike.warmup_steps=8",
    "model.dropout=0.1",
    "micro_batch_size=4",
    "trainer.max_steps=30",
    "eval_every=30",
    "save_every=10",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    text_folder = write_texts(tmp_path_factory.mktemp("texts"))
    folder = tmp_path_factory.mktemp("replay") / "run"
    overrides = [*OVERRIDES, f"data.path={text_folder}", f"hydra.run.dir={folder}"]
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    folder.mkdir()
    run = build(resolved(composed.config, folder))
    run.trainer.callbacks.insert(0, FaultAt(kind="inputs", step=24))  # type: ignore[attr-defined]
    assert fit(run) == 0
    freeze(composed)
    return folder


def test_a_dump_names_the_samples_of_a_spike_with_their_loss_file_and_text(
    run_folder: Path,
) -> None:
    folder = run_folder / "spikes/step_0000025"
    spike = json.loads((folder / "spike.json").read_text())
    assert spike["skipped"]
    assert spike["alarms"]["loss"]["kind"] == "spike"
    assert set(spike["weight_norms"]) >= {"blocks.0", "blocks.1"}
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted(sample["position"] for sample in samples) == list(range(24 * 8, 25 * 8))
    losses = [sample["loss"] for sample in samples]
    assert losses == sorted(losses, reverse=True)
    for sample in samples:
        assert sample["documents"][0]["name"].startswith("text_")
        assert len(sample["text"]) > 10
    state = torch.load(folder / "rank_00000.pt", weights_only=True)
    assert len(state["batches"]) == 2
    loss_by_row = {(s["micro_batch"], s["row"]): s["loss"] for s in samples}
    assert loss_by_row[1, 2] == pytest.approx(float(state["losses"][1][2]))


def test_replaying_a_fault_that_was_not_in_the_batch_gives_an_ordinary_step(
    run_folder: Path,
) -> None:
    """The fault was injected into the forward pass, so the recomputed step does not have it."""
    ended = run_train(["mode=replay", f"resume={run_folder}", "mode.step=25"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    replayed = json.loads((run_folder / "spikes/step_0000025/replay.json").read_text())
    rows = (run_folder / "metrics.csv").read_text().splitlines()
    names, before = rows[0].split(","), rows[24].split(",")
    loss = float(before[names.index("train/loss")])
    assert replayed["loss"] == pytest.approx(loss, rel=0.1)
    blocks = list(replayed["grad_norms"].values())
    # the squares of the block norms add up to the square of the global norm, in float32
    assert sum(value**2 for value in blocks) ** 0.5 == pytest.approx(replayed["grad_norm"], rel=1e-5)
    assert "text_" in ended.stdout + ended.stderr


def test_a_step_without_a_dump_is_an_error_that_names_the_steps_that_have_one(
    run_folder: Path,
) -> None:
    ended = run_train(["mode=replay", f"resume={run_folder}", "mode.step=7"])
    assert ended.returncode == 2
    assert "mode.step=25" in ended.stdout + ended.stderr


def write_dump(parent: Path, step: int) -> Path:
    dump = parent / "spikes" / f"step_{step:07d}"
    dump.mkdir(parents=True)
    values = {"loss": None, "grad_norm": 3.0, "weight_norms": {"embedding": 1.0}, "world_size": 1}
    (dump / "spike.json").write_text(json.dumps(values))
    torch.save({"batches": [{}], "random": [{}], "losses": []}, dump / "rank_00000.pt")
    return dump


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("rank_00000.pt", Path.unlink, "rank_00000.pt cannot be read: it is missing"),
        ("rank_00000.pt", as_pipe, "rank_00000.pt cannot be read: it is missing"),
        ("rank_00000.pt", cut, "rank_00000.pt cannot be read: "),
        ("rank_00000.pt", lambda path: torch.save({"batches": []}, path), "cannot be read: it has no random"),
        ("rank_00000.pt", lambda path: path.write_bytes(b"cos\nsystem\n(Vid\ntR."), "cannot be read: it "),
        ("spike.json", cut, "invalid JSON"),
        ("spike.json", lambda path: path.write_text('{"world_size": "x"}'), "cannot be read: it has no weight_norms"),
        ("spike.json", Path.unlink, "contains no dump of that step, only of 5"),
        ("spike.json", as_pipe, "contains no dump of that step, only of 5"),
    ],
)
def test_a_damaged_dump_is_an_error_that_names_another_one(
    name: str, damage: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoints/step_0000004.ckpt"
    monkeypatch.setattr("recipes.mode.replay.load_task", lambda run, weights: (None, checkpoint))
    write_dump(tmp_path, 5)
    dump = write_dump(tmp_path, 9)
    damage(dump / name)
    with pytest.raises(ConfigError) as raised:
        replay(SimpleNamespace(), step=9)  # type: ignore[arg-type]
    assert reason in raised.value.reason
    assert "weights_only" not in raised.value.reason, "no advice to run the code in a file"
    assert raised.value.setting in ("mode.step=9", str(dump / name))
    assert raised.value.fix == "mode.step=5"
    assert not (dump / "replay.json").exists()


def test_replaying_a_bad_batch_gives_the_recorded_loss_and_norm(tmp_path: Path, text_folder: str) -> None:
    folder = tmp_path / "run"
    overrides = [
        *OVERRIDES,
        f"data.path={text_folder}",
        f"hydra.run.dir={folder}",
        "optimizer.lr=1e-2",
    ]
    overrides += ["trainer.max_steps=160", "eval_every=160", "save_every=80", "ema_decay=0.9"]
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    folder.mkdir()
    run = build(resolved(composed.config, folder))
    run.trainer.callbacks.insert(0, FaultAt(kind="labels", step=150))  # type: ignore[attr-defined]
    assert fit(run) == 0
    freeze(composed)
    ended = run_train(["mode=replay", f"resume={folder}"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    recorded: dict[str, Any] = json.loads((folder / "spikes/step_0000151/spike.json").read_text())
    replayed = json.loads((folder / "spikes/step_0000151/replay.json").read_text())
    # another process with another number of threads adds float32 terms in another order
    assert replayed["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
    assert replayed["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-4)
    logging.getLogger("lightning_recipes").handlers.clear()
    val_loss: dict[str, float] = {}
    for weights in ("trained", "ema"):
        ended = run_train(["mode=evaluate", f"resume={folder}", f"mode.weights={weights}"])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = json.loads((folder / "evaluate_val.json").read_text())
        assert found["weights"] == weights
        val_loss[weights] = found["loss"]
    assert val_loss["ema"] != val_loss["trained"]
    assert abs(val_loss["ema"] - val_loss["trained"]) < 0.3


def test_evaluating_an_average_that_was_not_trained_is_an_error(run_folder: Path) -> None:
    ended = run_train(["mode=evaluate", f"resume={run_folder}", "mode.weights=ema"])
    assert ended.returncode == 2
    assert "ema_decay" in ended.stdout + ended.stderr


def test_random_samples_of_a_spike_are_dumped_as_drawn_can_be_drawn_again_and_are_replayed(tmp_path: Path) -> None:
    overrides = [
        "model=resnet18",
        "model._target_=small_models.SmallClassifier",
        "data.random_crop_padding=2",
        "data.random_horizontal_flip=true",
        "callbacks=[grad_norm,loss_spike]",
        "trainer.accelerator=cpu",
        "global_batch_size=16",
        "micro_batch_size=8",
        "trainer.max_steps=100",  # an epoch has 90
        "eval_every=100",
        f"hydra.run.dir={tmp_path}",
    ]
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    run = build(resolved(composed.config, tmp_path))
    run.trainer.callbacks.insert(0, FaultAt(kind="inf_gradient", step=95))  # type: ignore[attr-defined]
    assert fit(run) == 0
    freeze(composed)
    dump = tmp_path / "spikes/step_0000096"
    batches = torch.load(dump / "rank_00000.pt", weights_only=True)["batches"]
    train = run.data.source.train()
    for entry in map(json.loads, (dump / "samples.jsonl").read_text().splitlines()):
        assert entry["draw"] == {"seed": composed.config["seed"], "position": entry["position"]}
        drawn = train.sample(entry["sample"], rng_at(**entry["draw"]))
        assert torch.equal(batches[entry["micro_batch"]]["inputs"][entry["row"]], drawn["inputs"])
        assert batches[entry["micro_batch"]]["targets"][entry["row"]] == drawn["targets"]
    assert execute(*overrides, "mode=replay", f"resume={tmp_path}") == 0
    recorded, replayed = (json.loads((dump / f"{name}.json").read_text())["loss"] for name in ("spike", "replay"))
    assert replayed == pytest.approx(recorded, rel=1e-6)  # float32: two micro-batches are summed in another order
