"""Evaluate, test and predict with a LightningModule of one's own: the numbers of its own Trainer, on its loaders."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import own_modules
import pytest
from safetensors.torch import load_file
from support import execute

from recipes.config import compose_and_check
from recipes.run_folder import read_summary
from recipes.runtime.exit_codes import ExitCode

CLASSES = ("task=lightning", "data=lightning", "data.module={_target_: own_modules.Rows}")
TESTED = (*CLASSES, "task.module={_target_: own_modules.Tested}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    assert execute(*TESTED, "trainer.max_steps=15", "eval_every=20", f"hydra.run.dir={folder}") == 0
    return folder


@pytest.fixture(scope="module")
def module(folder: Path) -> own_modules.Tested:
    saved = load_file(folder / "checkpoints" / "last" / "rank_00000.safetensors")
    module = own_modules.Tested()
    module.load_state_dict({name: tensor for name, tensor in saved.items() if "/" not in name})
    return module


def get_trainer() -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet)  # type: ignore[arg-type]


def ask(folder: Path, mode: str, *overrides: str) -> int:
    return execute(*TESTED, f"mode={mode}", f"resume={folder}", *overrides)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_validation_and_test_log_what_its_own_trainer_logs(folder: Path, module: own_modules.Tested) -> None:
    assert ask(folder, "evaluate") == ask(folder, "test") == 0
    (validated,) = get_trainer().validate(module, datamodule=own_modules.Rows(), verbose=False)
    (tested,) = get_trainer().test(module, datamodule=own_modules.Rows(), verbose=False)
    assert {*validated} == {"val_loss"}
    assert {*tested} == {"test_acc"}
    for name, expected in (("val", validated), ("test", tested)):
        record = json.loads((folder / f"evaluate_{name}.json").read_text())
        assert record["split"] == name
        assert {key: record[key] for key in expected} == expected
    summary = read_summary(folder)
    assert summary is not None
    assert summary["evaluations"]["test"]["test_acc"] == tested["test_acc"]


def test_what_a_module_draws_in_an_evaluation_is_skipped_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = (*CLASSES, "task.module={_target_: own_modules.Sampling}")
    assert execute(*sampling, "trainer.max_steps=1", f"hydra.run.dir={tmp_path}") == 0
    rows = (tmp_path / "metrics.csv").read_text()
    assert execute(*sampling, "mode=evaluate", f"resume={tmp_path}") == 0
    printed = "".join(capsys.readouterr())
    assert "mode=evaluate keeps nothing of add_figure(…); its metrics are those of self.log\n" in printed
    assert (tmp_path / "metrics.csv").read_text() == rows
    assert {*json.loads((tmp_path / "evaluate_val.json").read_text())} >= {"val_loss"}


@pytest.mark.parametrize(("split", "number"), [("val", 50), ("test", 30)])
def test_each_row_has_what_its_predict_step_returns(
    folder: Path, module: own_modules.Tested, split: str, number: int
) -> None:
    data = own_modules.Rows()
    data.setup()
    loader = getattr(data, f"{split}_dataloader")()
    batches: Any = get_trainer().predict(module, loader)
    typed = [] if split == "val" else [f"mode.split={split}"]
    assert ask(folder, "predict", *typed) == 0
    rows = read_lines(folder / f"predictions_{'predict' if split == 'val' else split}.jsonl")
    assert [row["sample"] for row in rows] == [*range(number)]
    assert [row["class"] for row in rows] == [value for batch in batches for value in batch["class"].tolist()]
    assert [row["scores"] for row in rows] == [value for batch in batches for value in batch["scores"].tolist()]
    assert {row["shown"] for row in rows} == {"row of 8"}


def test_data_of_ours_is_predicted_with_a_module_of_ones_own(tmp_path: Path) -> None:
    module = "task.module={_target_: own_modules.Tested, num_inputs: 64}"
    digits = ("task=lightning", module, "data=digits", "task.batch=[inputs, targets]", "callbacks=[]")
    assert execute(*digits, "trainer.max_steps=3", f"hydra.run.dir={tmp_path}") == 0
    table = tmp_path / "p.csv"
    assert execute(*digits, "mode=predict", "mode.split=val", f"resume={tmp_path}", f"mode.path={table}") == 0
    lines = table.read_text().splitlines()
    assert lines[0] == "sample,class," + ",".join(f"scores_{index}" for index in range(10)) + ",shown"
    assert execute(*digits, "mode=evaluate", f"resume={tmp_path}") == 0
    assert json.loads((tmp_path / "evaluate_val.json").read_text())["val_loss"] > 0


@pytest.mark.parametrize(
    ("mode", "module", "reason"),
    [
        ("test", "Classifier", "Classifier has no test_step"),
        ("predict", "Averaging", "has no row per sample"),
    ],
)
def test_a_step_that_is_missing_or_returns_no_rows_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: str, module: str, reason: str
) -> None:
    typed = (*CLASSES, f"task.module={{_target_: own_modules.{module}}}")
    assert execute(*typed, f"mode={mode}", f"resume={folder}") == ExitCode.INVALID_CONFIG
    assert reason in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("override", ["mode.weights=ema", "evaluator=lm_eval evaluator.tasks=[arc_easy]"])
def test_what_only_models_of_ours_know_is_refused(folder: Path, override: str) -> None:
    mistakes = compose_and_check([*TESTED, "mode=evaluate", f"resume={folder}", *override.split()])[1]
    assert any("by its own steps" in str(mistake) for mistake in mistakes), mistakes
