"""A LightningModule of one's own on two ranks: one curve under DDP, FSDP2 and ZeRO-2, and a resume within an epoch."""

from pathlib import Path

import pytest
from cases import IS_LONG
from support import ROOT, read_metrics, run_train

from recipes.run_folder import EVENTS_FILE, read_events

OWN = (
    "task=lightning",
    "task.module={_target_: own_modules.Branched, dropout: 0.2}",
    "data=lightning",
    "data.module={_target_: own_modules.Rows, noisy: false}",
    *(
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "trainer.accumulate_grad_batches=2",
        "eval_every=4",
        "save_every=3",
    ),
)
ENGINES = ["fsdp", *(["deepspeed_stage_2", "deepspeed_stage_1"] if IS_LONG else [])]


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Return the rows of a run with eight steps at most."""
    done = run_train([*OWN, *overrides, f"hydra.run.dir={folder}"], python_path=str(ROOT / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(folder)


@pytest.fixture(scope="module")
def on_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return train(tmp_path_factory.mktemp("ddp"), "strategy=ddp", "trainer.max_steps=8")


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_and_a_resume_within_an_epoch_goes_on(
    tmp_path: Path, on_ddp: list[dict[str, float]], engine: str
) -> None:
    train(tmp_path, f"strategy={engine}", "trainer.max_steps=5")
    rows = train(tmp_path, f"strategy={engine}", "trainer.max_steps=8", "resume=auto")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    for own, expected in zip(rows, on_ddp, strict=True):
        # float32 sums over ranks in another order
        assert own["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
        if "grad/norm" in own:  # ZeRO knows it for the whole window
            assert own["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-5)


def test_ranks_validate_with_the_same_statistics_and_agree_on_the_best(tmp_path: Path) -> None:
    module = "~task.module.dropout", "task.module._target_=own_modules.Normalized"
    rows = train(tmp_path, *module, "strategy=ddp", "eval_every=auto", "save_every=auto", "trainer.max_epochs=2")
    validated = [row for row in rows if "val_loss" in row]
    assert [(row["step"], row["val_spread"]) for row in validated] == [(4, 0.0), (8, 0.0)]
    assert all(row["val_mean"] > 0 for row in validated)
    saved = [event["step"] for event in read_events(tmp_path / EVENTS_FILE) if event["event"] == "checkpoint"]
    assert saved == [4, 8]


@pytest.mark.parametrize(
    ("engine", "reason"), [("fsdp", "it freezes parameters"), ("deepspeed_stage_1", "it has 2 optimizers")]
)
def test_what_an_engine_cannot_do_with_two_optimizers_is_refused(tmp_path: Path, engine: str, reason: str) -> None:
    own = [override for override in OWN if not override.startswith("task.module")]
    adversaries = "task.module={_target_: own_modules.Adversaries}"
    alone = (
        "trainer.devices=1",
        "trainer.accumulate_grad_batches=1",
        f"strategy={engine}",
        f"hydra.run.dir={tmp_path}",
    )
    done = run_train([*own, adversaries, *alone], python_path=str(ROOT / "tests"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert reason in done.stdout + done.stderr
    assert "strategy=ddp" in done.stdout + done.stderr
