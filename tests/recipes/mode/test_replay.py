"""A step out of line, made again from its evidence on one device."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FaultAt
from support import TINY, run_train, write_texts

from recipes.build import build
from recipes.config import compose_and_check
from recipes.config.compose import freeze
from recipes.mode.fit import fit

WORDS = [
    *(word for word in TINY if not word.startswith("~")),
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
    words = [*WORDS, f"data.path={text_folder}", f"hydra.run.dir={folder}"]
    composed, mistakes = compose_and_check(words)
    assert composed is not None, [str(one) for one in mistakes]
    folder.mkdir()
    run = build(composed.config, folder, [])
    run.trainer.callbacks.insert(0, FaultAt(kind="inputs", step=24))  # type: ignore[attr-defined]
    assert fit(run) == 0
    freeze(composed)
    return folder


def test_a_spike_leaves_its_samples_with_their_losses_files_and_text(run_folder: Path) -> None:
    folder = run_folder / "spikes/step_0000025"
    told = json.loads((folder / "spike.json").read_text())
    assert told["skipped"]
    assert told["alarms"]["loss"]["kind"] == "spike"
    assert set(told["weight_norms"]) >= {"blocks.0", "blocks.1"}
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert sorted(one["position"] for one in samples) == list(range(24 * 8, 25 * 8))
    losses = [one["loss"] for one in samples]
    assert losses == sorted(losses, reverse=True)
    for one in samples:
        assert one["documents"][0]["name"].startswith("text_")
        assert len(one["text"]) > 10
    state = torch.load(folder / "rank_00000.pt", weights_only=True)
    assert len(state["batches"]) == 2
    of_row = {(one["micro_batch"], one["row"]): one["loss"] for one in samples}
    assert of_row[1, 2] == pytest.approx(float(state["losses"][1][2]))


def test_a_replay_has_the_loss_and_the_norms_of_the_step_without_its_fault(
    run_folder: Path,
) -> None:
    """The fault was in the forward pass, not in the batch: made again, the step is an ordinary one."""
    ended = run_train(["mode=replay", f"resume={run_folder}", "mode.step=25"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    again = json.loads((run_folder / "spikes/step_0000025/replay.json").read_text())
    rows = (run_folder / "metrics.csv").read_text().splitlines()
    names, before = rows[0].split(","), rows[24].split(",")
    loss = float(before[names.index("train/loss")])
    assert again["loss"] == pytest.approx(loss, rel=0.1)
    blocks = list(again["grad_norms"].values())
    # squares of the blocks add up to the square of the whole, in float32
    assert sum(value**2 for value in blocks) ** 0.5 == pytest.approx(again["grad_norm"], rel=1e-5)
    assert "text_" in ended.stdout + ended.stderr


def test_a_step_without_evidence_names_those_that_have_some(run_folder: Path) -> None:
    ended = run_train(["mode=replay", f"resume={run_folder}", "mode.step=7"])
    assert ended.returncode == 2
    assert "mode.step=25" in ended.stdout + ended.stderr


def test_a_bad_batch_is_replayed_to_the_recorded_numbers(tmp_path: Path, text_folder: str) -> None:
    folder = tmp_path / "run"
    words = [*WORDS, f"data.path={text_folder}", f"hydra.run.dir={folder}", "optimizer.lr=1e-2"]
    words += ["trainer.max_steps=160", "eval_every=160", "save_every=80", "ema_decay=0.9"]
    composed, mistakes = compose_and_check(words)
    assert composed is not None, [str(one) for one in mistakes]
    folder.mkdir()
    run = build(composed.config, folder, [])
    run.trainer.callbacks.insert(0, FaultAt(kind="labels", step=150))  # type: ignore[attr-defined]
    assert fit(run) == 0
    freeze(composed)
    ended = run_train(["mode=replay", f"resume={folder}"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told: dict[str, Any] = json.loads((folder / "spikes/step_0000151/spike.json").read_text())
    again = json.loads((folder / "spikes/step_0000151/replay.json").read_text())
    # one process with another number of threads: float32 sums in another order
    assert again["loss"] == pytest.approx(told["loss"], rel=1e-6)
    assert again["grad_norm"] == pytest.approx(told["grad_norm"], rel=1e-4)
    logging.getLogger("lightning_recipes").handlers.clear()
    for weights in ("trained", "ema"):
        ended = run_train(["mode=evaluate", f"resume={folder}", f"mode.weights={weights}"])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = json.loads((folder / "evaluate_val.json").read_text())
        assert found["weights"] == weights
        told[weights] = found["loss"]
    assert told["ema"] != told["trained"]
    assert abs(told["ema"] - told["trained"]) < 0.3


def test_a_run_without_an_average_says_so(run_folder: Path) -> None:
    ended = run_train(["mode=evaluate", f"resume={run_folder}", "mode.weights=ema"])
    assert ended.returncode == 2
    assert "ema_decay" in ended.stdout + ended.stderr
