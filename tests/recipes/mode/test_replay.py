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
from lightning.pytorch.callbacks import Callback
from support import TINY, execute, resolved, run_train, write_texts

from recipes.build import build
from recipes.config import compose_and_check
from recipes.config.compose import freeze
from recipes.data.draws import rng_at
from recipes.errors import ConfigError
from recipes.mode.fit import fit
from recipes.mode.replay import _find_anchor, replay
from recipes.tokenizer.bytes import byte_tokenizer


class Recorder(Callback):
    """Records the losses of the samples of a step, in the order of the stream, before it changes the weights."""

    def __init__(self, step: int) -> None:
        self.losses: list[float] = []
        self.inputs: list[torch.Tensor] = []
        self._step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self._step:
            pl_module.eval()
            with torch.no_grad():
                self.losses += pl_module.recipes_sample_losses(batch).tolist()
            self.inputs += [*batch["inputs"]]
            pl_module.train()


def read_replayed(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step that was read again, in the order of the stream."""
    lines = (folder / f"replayed_step_{step:07d}.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda sample: int(sample["position"]))


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
def recorders() -> list[Recorder]:
    return [Recorder(7), Recorder(21)]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, recorders: list[Recorder]) -> Path:
    torch.set_num_threads(1)
    text_folder = write_texts(tmp_path_factory.mktemp("texts"))
    folder = tmp_path_factory.mktemp("replay") / "run"
    overrides = [*OVERRIDES, f"data.path={text_folder}", f"hydra.run.dir={folder}"]
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    folder.mkdir()
    run = build(resolved(composed.config, folder))
    run.trainer.callbacks.insert(0, FaultAt(kind="inputs", step=24))  # type: ignore[attr-defined]
    run.trainer.callbacks.extend(recorders)  # type: ignore[attr-defined]
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


def test_a_step_without_a_dump_is_read_again_and_its_samples_have_the_losses_that_they_had(
    run_folder: Path, recorders: list[Recorder]
) -> None:
    early, late = recorders
    output = {}
    for step in (7, 21, 22):
        ended = run_train(["mode=replay", f"resume={run_folder}", f"mode.step={step}"])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        output[step] = ended.stdout
    tokenizer = byte_tokenizer()
    samples = read_replayed(run_folder, 21)  # from the checkpoint of step 20: exactly the weights of then
    assert [sample["loss"] for sample in samples] == pytest.approx(late.losses, rel=1e-5)  # another number of threads
    assert [sample["text"] for sample in samples] == [tokenizer.decode(row.tolist()) for row in late.inputs]
    assert [sample["position"] for sample in samples] == list(range(160, 168))
    assert "samples 160 to 167 of the stream, with the weights of step_0000020.ckpt" in output[21]
    # step 10 is not kept: only its batch is that of the step, with the weights of the beginning
    samples = read_replayed(run_folder, 7)
    assert [sample["text"] for sample in samples] == [tokenizer.decode(row.tolist()) for row in early.inputs]
    assert "that the run began with" in output[7]
    # one sample in the same place of the output as in the file, and a later step under the same checkpoint
    assert f"sample {max(samples, key=lambda sample: float(sample['loss']))['sample']} text_" in output[7]
    assert "samples 168 to 175 of the stream, with the weights of step_0000020.ckpt" in output[22]


def test_a_step_after_the_end_of_the_run_is_an_error_that_names_the_last_one(run_folder: Path) -> None:
    ended = run_train(["mode=replay", f"resume={run_folder}", "mode.step=31"])
    assert ended.returncode == 2
    assert "type: mode.step=30" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("events", "step", "anchor"),
    [
        ([], 35, None),
        ([("rollback", 30, 400)], 30, None),  # the step was not repeated
        ([("rollback", 30, 400)], 31, (30, 400)),
        ([("rollback", 40, 400), ("rollback", 30, 500)], 42, (30, 500)),
        ([("rollback", 30, 400), ("rollback", 40, 500)], 35, (30, 400)),
        ([("rollback", 30, 400), ("checkpoint", 20, None)], 35, None),  # which has the position
        ([("rollback", 30, 400), ("resume", 25, None)], 35, None),  # those steps were repeated
    ],
)
def test_the_position_of_a_step_is_counted_from_the_last_rollback_before_it(
    tmp_path: Path, events: list[tuple[str, int, int | None]], step: int, anchor: tuple[int, int] | None
) -> None:
    lines = [{"event": name, "step": at, "position": position} for name, at, position in events]
    lines = [line | {"path": "step_0000020.ckpt"} if line["event"] == "checkpoint" else line for line in lines]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _find_anchor(tmp_path, Path("step_0000020.ckpt"), 20, step) == anchor


def test_a_rollback_of_an_earlier_version_leaves_the_position_unknown(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "rollback", "step": 30}\n')
    with pytest.raises(ConfigError, match="rolled back to step 30"):
        _find_anchor(tmp_path, None, 0, 31)


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
        replay(SimpleNamespace(checkpoint=checkpoint), step=9)  # type: ignore[arg-type]
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
    found: dict[str, Any] = {}
    for weights in ("ema", "both"):
        ended = run_train(["mode=evaluate", f"resume={folder}", f"mode.weights={weights}"])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found[weights] = json.loads((folder / "evaluate_val.json").read_text())
    assert (found["ema"]["weights"], found["both"]["weights"]) == ("ema", "trained")
    assert found["both"]["ema"]["loss"] == found["ema"]["loss"] != found["both"]["loss"]
    assert abs(found["ema"]["loss"] - found["both"]["loss"]) < 0.3
    evaluations = json.loads((folder / "summary.json").read_text())["evaluations"]
    assert [evaluations[name]["weights"] for name in ("val", "val/ema")] == ["trained", "ema"]
    assert evaluations["val"]["loss"] == found["both"]["loss"]
    assert "Evaluations</h2>" in (folder / "report.html").read_text()


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
        "save_every=80",
        f"hydra.run.dir={tmp_path}",
    ]
    composed, mistakes = compose_and_check(overrides)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    run = build(resolved(composed.config, tmp_path))
    run.trainer.callbacks.insert(0, FaultAt(kind="inf_gradient", step=95))  # type: ignore[attr-defined]
    run.trainer.callbacks.append(recorder := Recorder(81))  # type: ignore[attr-defined]
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
    assert execute(*overrides, "mode=replay", f"resume={tmp_path}", "mode.step=81") == 0
    samples = read_replayed(tmp_path, 81)
    assert [sample["loss"] for sample in samples] == pytest.approx(recorder.losses, rel=1e-6)
    assert [sample["shapes"]["inputs"] for sample in samples] == [list(row.shape) for row in recorder.inputs]
