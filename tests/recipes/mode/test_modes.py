"""One small run and everything that is done with it: its files, evaluate, sample, export, resume."""

import contextlib
import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from full_disk import full_disk
from support import TINY, composed_config, execute, read_metrics, resolved, write_texts

from recipes.config import compose_and_check

RUN_FILES = [
    ".lock",
    "checkpoints",
    "config.yaml",
    "curves.png",
    "environment.json",
    "events.jsonl",
    "metrics.csv",
    "report.html",
    "samples.jsonl",
    "summary.json",
    "tokenizer",
    "train.log",
]
SUMMARY_KEYS = [
    "best_val_loss",
    "ended_by",
    "excluded_seconds",
    "measures",
    "mfu",
    "num_parameters",
    "peak_memory_gib",
    "rollbacks",
    "samples",
    "samples_per_second",
    "seconds",
    "skipped_steps",
    "status",
    "steps",
    "tokens",
    "tokens_per_second",
    "train_loss",
    "val_loss",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def typed(texts: Path) -> list[str]:
    """Return the overrides of the run, which writes a report and a sample."""
    small = [override for override in TINY if not override.startswith("~")]
    return [
        *small,
        f"data.path={texts}",
        "scheduler=constant",
        "warmup_steps=4",
        "model.dropout=0.1",
    ]


@pytest.fixture(scope="module")
def run(typed: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    overrides = ["trainer.max_steps=12", "save_every=6", "eval_every=6", "eval_samples=null"]
    assert execute(*typed, *overrides, f"hydra.run.dir={folder}") == 0
    return folder


def test_a_run_leaves_exactly_the_files_it_promises(run: Path) -> None:
    assert sorted(entry.name for entry in run.iterdir()) == RUN_FILES
    assert sorted(json.loads((run / "summary.json").read_text())) == SUMMARY_KEYS
    kept = sorted(entry.name for entry in (run / "checkpoints").iterdir())
    assert kept == ["best", "last", "step_0000006.ckpt", "step_0000012.ckpt"]
    assert (run / "checkpoints" / "last").resolve().name == "step_0000012.ckpt"


def test_metrics_have_one_row_per_step_with_validation_in_the_row_of_its_step(run: Path) -> None:
    rows = read_metrics(run)
    assert (run / "metrics.csv").read_text().startswith("step,train/loss,")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "val/loss" in row] == [6, 12]
    assert [row["train/samples"] for row in rows] == [8.0 * step for step in range(1, 13)]
    assert [row["train/tokens"] for row in rows] == [8.0 * 32 * step for step in range(1, 13)]
    assert [row["lr"] for row in rows[:5]] == pytest.approx([0.00075, 0.0015, 0.00225, 0.003, 0.003])
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 1.0


def test_the_summary_agrees_with_the_last_row(run: Path) -> None:
    summary, last = json.loads((run / "summary.json").read_text()), read_metrics(run)[-1]
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["samples"], summary["tokens"]) == (12, 96, 3072)
    assert summary["train_loss"] == pytest.approx(last["train/loss"], rel=1e-8)
    assert summary["val_loss"] == pytest.approx(last["val/loss"], rel=1e-6)
    assert summary["best_val_loss"] <= summary["val_loss"]
    assert summary["tokens_per_second"] > 0
    assert summary["mfu"] is None


def test_events_are_logged_in_order(run: Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("checkpoint", 6),
        ("checkpoint", 12),
        ("end", 12),
    ]


def test_the_frozen_config_composes_to_itself(run: Path) -> None:
    composed, mistakes = compose_and_check([], config_folder=run, config_name="config")
    assert not mistakes
    assert composed is not None
    frozen = yaml.safe_load((run / "config.yaml").read_text())
    frozen.pop("hydra")
    assert composed.config == frozen


def test_the_environment_names_versions_devices_and_the_command(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["devices"]
    assert "tokenizer=bytes" in environment["overrides"]


def test_the_log_holds_every_row_and_the_last_line_names_losses_and_folder(run: Path) -> None:
    lines = (run / "train.log").read_text().splitlines()
    assert sum(line.lstrip().startswith("step") and "loss" in line for line in lines) >= 12
    assert lines[-1].startswith("Finished: 12 steps, train loss ")
    assert str(run) in lines[-1]


def test_evaluate_gives_the_validation_loss_of_the_run(run: Path) -> None:
    assert execute(f"resume={run}", "mode=evaluate") == 0
    found = json.loads((run / "evaluate_val.json").read_text())
    last = read_metrics(run)[-1]
    # the same sums over the same samples, in float64
    assert found["loss"] == pytest.approx(last["val/loss"], rel=1e-7)
    assert found["perplexity"] == pytest.approx(last["val/perplexity"], rel=1e-6)
    (run / "evaluate_val.json").unlink()


def test_another_text_is_evaluated_as_a_whole_and_the_runs_own_in_its_validation_split(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text("ab" * 400)  # 801 tokens with the end: 25 samples of 32
    assert execute(f"resume={run}", "mode=evaluate", f"data.path={tmp_path}/other.txt") == 0
    found = json.loads((run / "evaluate_val.json").read_text())
    assert (found["samples"], found["whole"]) == (25, ["data"])
    assert "on all 25 samples of the data: loss" in capsys.readouterr().out
    rows = f"data=documents data.path={tmp_path}/rows.jsonl".split()
    (tmp_path / "rows.jsonl").write_text('{"text": "' + "ab" * 400 + '"}\n')
    assert execute(f"resume={run}", "mode=evaluate", *rows) == 0
    again = json.loads((run / "evaluate_val.json").read_text())
    assert (again["samples"], again["loss"]) == (25, found["loss"])
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{"ab" * number}"}}\n' for number in range(100, 140)))
    assert execute(f"resume={run}", "mode=evaluate", *rows, "data.val_fraction=0.5") == 0
    part = json.loads((run / "evaluate_val.json").read_text())
    assert part["whole"] == [], "a part of data of another kind, too"
    assert 0 < part["samples"] < 40 * 240 / 32 * 0.8
    assert execute(f"resume={run}", "mode=evaluate", f"data.path={tmp_path}/other.txt", "data.val_fraction=0.5") == 0
    assert json.loads((run / "evaluate_val.json").read_text())["samples"] == 12
    assert "on the 12 samples of val, 0.5 of the data: loss" in capsys.readouterr().out
    more = ["+data@eval_data.mine=text_files", f"eval_data.mine.path={tmp_path}/other.txt"]
    assert execute(f"resume={run}", "mode=evaluate", *more) == 0
    added = json.loads((run / "evaluate_val.json").read_text())
    assert added["whole"] == ["eval_data.mine"]
    assert added["mine/loss"] == pytest.approx(found["loss"], rel=1e-6)
    (run / "evaluate_val.json").unlink()


def test_evaluations_are_in_the_summary_beside_what_was_there_and_name_their_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy", symlinks=True)
    before = json.loads((copy / "summary.json").read_text())
    before.pop("evaluations", None)
    found = {}
    for checkpoint in ("step_0000006.ckpt", "step_0000012.ckpt"):
        assert execute(f"resume={copy}/checkpoints/{checkpoint}", "mode=evaluate") == 0
        after = json.loads((copy / "summary.json").read_text())
        found[checkpoint] = after.pop("evaluations")["val"]
        assert after == before
        assert found[checkpoint]["checkpoint"] == checkpoint
        assert found[checkpoint]["loss"] == json.loads((copy / "evaluate_val.json").read_text())["loss"]
    assert found["step_0000006.ckpt"]["loss"] != found["step_0000012.ckpt"]["loss"]
    assert execute(f"resume={copy}", "trainer.max_steps=13") == 0
    resumed = json.loads((copy / "summary.json").read_text())
    assert resumed["steps"] == 13
    assert resumed["evaluations"]["val"] == found["step_0000012.ckpt"]


def test_evaluate_computes_a_metric_that_the_run_did_not_have(run: Path) -> None:
    top = "{_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 257, top_k: 20, average: micro}"
    assert execute(f"resume={run}", "mode=evaluate", f"+metrics.top20={top}") == 0
    found = json.loads((run / "evaluate_val.json").read_text())
    assert found["token_accuracy"] == pytest.approx(read_metrics(run)[-1]["val/token_accuracy"], rel=1e-7)
    assert 0.0 < found["token_accuracy"] < found["top20"] < 1.0
    (run / "evaluate_val.json").unlink()


def test_evaluate_on_other_data_keeps_the_tokenizer_of_the_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("value_1 = 2\n" * 400)
    overrides = [
        f"resume={run}",
        "mode=evaluate",
        f"data.path={tmp_path}/other.txt",
        "mode.split=train",
    ]
    assert execute(*overrides) == 0
    found = json.loads((run / "evaluate_train.json").read_text())
    assert found["split"] == "train"
    assert 0.0 < found["loss"] < 5.5
    (run / "evaluate_train.json").unlink()


def test_a_sample_depends_on_nothing_but_its_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        overrides = ["mode.prompt=a =", f"mode.seed={seed}", "mode.max_new_tokens=40"]
        assert execute(f"resume={run}", "mode=sample", *overrides) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("a =") for text in texts)


def test_an_export_is_loaded_by_transformers_with_the_same_logits(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "exported"
    assert execute(f"resume={run}", "mode=export", f"mode.path={folder}") == 0
    # the umask decides, and not safetensors: a server may run under another user
    assert {path.stat().st_mode for path in folder.iterdir()} == {(run / "config.yaml").stat().st_mode}
    exported = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)("value_1 = 2", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list(b"value_1 = 2")]
    config = composed_config(f"resume={run}", "mode=export")
    from recipes.build import build
    from recipes.mode.load import load_task

    task, checkpoint = load_task(build(resolved(config, run)), "trained")
    assert checkpoint.name == "step_0000012.ckpt"
    with torch.inference_mode():
        difference = task.model(tokens)[..., :257] - exported(tokens).logits
    assert difference.abs().max().item() < 1e-5  # float32, other kernels for the same sums


RESUMED_METRICS = ("train/loss", "grad/norm", "lr", "train/samples", "train/tokens", "val/loss")
WITHOUT_CALLBACKS = [
    "~callbacks.report",
    "~callbacks.sample_text",
    "~callbacks.memory",
    "~callbacks.throughput",
]


@pytest.fixture(scope="module")
def uninterrupted(typed: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Return the rows of 18 uninterrupted steps, without dropout, on a decaying schedule."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert execute(*typed, *WITHOUT_CALLBACKS, *DECAYING, f"hydra.run.dir={folder}") == 0
    return read_metrics(folder)


DECAYING = [
    "trainer.max_steps=18",
    "save_every=4",
    "eval_every=6",
    "scheduler=linear",
    "model.dropout=0.0",
    "micro_batch_size=4",
]


@pytest.mark.parametrize(
    ("stop", "resume_from", "resumed_micro_batch_size"),
    [(13, 12, 4), (11, 8, 4), (5, 4, 4), (13, 12, 2), (11, 8, 8), (5, 4, 1)],
)
def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(
    uninterrupted: list[dict[str, float]],
    typed: list[str],
    tmp_path: Path,
    stop: int,
    resume_from: int,
    resumed_micro_batch_size: int,
) -> None:
    """The run crashes between two checkpoints and resumes, also with another micro-batch size."""
    folder = tmp_path / "run"
    crash = f"+callbacks.crash={{_target_: support.CrashAt, step: {stop}}}"
    assert execute(*typed, *WITHOUT_CALLBACKS, *DECAYING, crash, f"hydra.run.dir={folder}") == 1
    assert (folder / "checkpoints" / "last").resolve().name == f"step_{resume_from:07d}.ckpt"
    changes = ["~callbacks.crash", f"micro_batch_size={resumed_micro_batch_size}"]
    assert execute(f"resume={folder}", *changes) == 0
    found = read_metrics(folder)
    assert [row["step"] for row in found] == list(range(1, 19))
    assert [row["step"] for row in found if "val/loss" in row] == [6, 12, 18]
    # another micro-batch size adds the same terms in another order
    tolerance = 0.0 if resumed_micro_batch_size == 4 else 1e-5
    for row, expected in zip(found, uninterrupted, strict=True):
        for name in RESUMED_METRICS:
            assert (name in row) == (name in expected)
            if name in row:
                assert row[name] == pytest.approx(expected[name], rel=tolerance), (
                    row["step"],
                    name,
                )
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [resume_from]


def test_a_resumed_run_with_dropout_is_equal_bit_for_bit(typed: list[str], tmp_path: Path) -> None:
    overrides = [*typed, *WITHOUT_CALLBACKS, *DECAYING, "model.dropout=0.1", "trainer.max_steps=10"]
    assert execute(*overrides, f"hydra.run.dir={tmp_path}/whole") == 0
    crash = "+callbacks.crash={_target_: support.CrashAt, step: 7}"
    assert execute(*overrides, crash, f"hydra.run.dir={tmp_path}/run") == 1
    assert execute(f"resume={tmp_path}/run", "~callbacks.crash") == 0
    expected, found = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    for name in ("train/loss", "grad/norm"):
        assert [row[name] for row in found] == [row[name] for row in expected]


def test_overrides_of_a_resume_apply_from_its_first_step(typed: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["trainer.max_steps=4", "save_every=4", "eval_every=4", "scheduler=constant"]
    assert execute(*typed, *WITHOUT_CALLBACKS, *overrides, f"hydra.run.dir={folder}") == 0
    longer = [
        "trainer.max_steps=6",
        "optimizer.lr=1e-5",
        "optimizer.weight_decay=0",
        "eval_every=2",
    ]
    assert execute(f"resume={folder}", *longer) == 0
    rows = read_metrics(folder)
    assert [row["lr"] for row in rows[4:]] == [1e-5, 1e-5]
    assert [row["step"] for row in rows if "val/loss" in row] == [4, 6]
    state = torch.load(folder / "checkpoints" / "last" / "run.pt", weights_only=True)
    decays = [group["weight_decay"] for group in state["optimizer_states"][0]["param_groups"]]
    assert decays == [0, 0]


def test_another_optimizer_cannot_resume_from_the_state_of_this_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(f"resume={run}", "trainer.max_steps=20", "optimizer=sgd", *WITHOUT_CALLBACKS) == 2
    console = capsys.readouterr().out
    assert "the checkpoint holds the state of AdamW" in console
    assert "type: the same command without optimizer=, or resume=null to train with another one" in console


def test_resuming_a_finished_run_changes_nothing(run: Path) -> None:
    before = (run / "summary.json").read_text()
    assert execute(f"resume={run}", "trainer.max_steps=12") == 0
    assert (run / "summary.json").read_text() == before


def test_resuming_from_an_older_checkpoint_sets_the_later_ones_aside(typed: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["trainer.max_steps=8", "save_every=2", "eval_every=8", "checkpoint.keep_last=4"]
    assert execute(*typed, *WITHOUT_CALLBACKS, *overrides, f"hydra.run.dir={folder}") == 0
    older = folder / "checkpoints" / "step_0000004.ckpt"
    assert execute(f"resume={older}", "trainer.max_steps=6") == 0
    assert (folder / "checkpoints" / "last").resolve().name == "step_0000006.ckpt"
    names = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert names == [f"step_{step:07d}.ckpt" for step in (2, 4, 6)]
    assert len(list((folder / "checkpoints").glob("abandoned_*"))) == 2
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_stops_early_saves_and_validates_its_last_step(typed: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop = "+callbacks.stop={_target_: support.StopAt, step: 5}"
    overrides = ["save_every=100", "eval_every=100", "micro_batch_size=2", stop]
    assert execute(*typed, *WITHOUT_CALLBACKS, *overrides, f"hydra.run.dir={folder}") == 0
    assert (folder / "checkpoints" / "last").resolve().name == "step_0000005.ckpt"
    assert "val/loss" in read_metrics(folder)[-1]


def test_starting_another_run_in_a_used_folder_is_a_config_error(run: Path, typed: list[str]) -> None:
    _, mistakes = compose_and_check([*typed, f"hydra.run.dir={run}"])
    assert [mistake.fix for mistake in mistakes] == [
        f"resume=auto hydra.run.dir={run} to resume it, or hydra.run.dir=<another folder>"
    ]


def test_resume_auto_starts_in_an_empty_folder_and_resumes_in_a_used_one(typed: list[str], tmp_path: Path) -> None:
    command = [
        *typed,
        "resume=auto",
        f"hydra.run.dir={tmp_path}/run",
        "save_every=2",
        "eval_every=9",
    ]
    quiet = ["~callbacks.report", "~callbacks.sample_text"]
    assert execute(*command, *quiet, "trainer.max_steps=2") == 0
    assert execute(*command, *quiet, "trainer.max_steps=4") == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [event["event"] for event in events if event["event"] != "checkpoint"] == [
        "start",
        "end",
        "resume",
        "end",
    ]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_is_evaluated_into_a_folder_that_is_new(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    folder = tmp_path / "a/new/one"
    assert execute("mode=evaluate", f"resume={run}", f"hydra.run.dir={folder}") == 0
    printed = capfd.readouterr().out
    record = json.loads((folder / "evaluate_val.json").read_text())
    assert f"loss {record['loss']:.4f}" in printed
    assert json.loads((folder / "summary.json").read_text())["evaluations"]["val"]["loss"] == record["loss"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("file", ["evaluate_val.json", "summary.json"])
def test_numbers_that_cannot_be_kept_are_printed(
    file: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with full_disk(tmp_path, lambda path, number: path.endswith(file)), capfd.disabled():
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert execute("mode=evaluate", f"resume={run}", f"hydra.run.dir={tmp_path}/new") == 74
    *_, numbers, last = output.getvalue().splitlines()
    assert " of val, " in numbers
    assert ": loss " in numbers
    assert last == f"{tmp_path}/new/{file} could not be written: File too large; make room, then the same command"


def test_a_failed_read_is_no_full_disk(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def read(composed: object, **_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/shard.bin")

    monkeypatch.setattr("recipes.build.execute", read)
    assert execute("mode=evaluate", f"resume={run}", f"hydra.run.dir={tmp_path}/new") == 1
    output = capfd.readouterr().out
    assert "Traceback" in output
    assert "Input/output error: '/data/shard.bin'" in output
    assert "could not be written" not in output


OUTPUTS = {
    "evaluate": ["hydra.run.dir={path}"],
    "export": ["mode.path={path}"],
    "plan": ["mode.path={path}"],
    "preflight": ["mode.path={path}"],
    "batch_find": ["mode.path={path}"],
    "lr_find": ["mode.path={path}"],
    "noise_scale": ["mode.path={path}"],
    "diagnose": ["mode.path={path}", "mode.runs=[{run}]"],
    "report": ["mode.path={path}/page.html", "mode.runs=[{run}]"],
    "dashboard": ["mode.path={path}"],
    "wandb_sweep": ["mode.path={path}", "'optimizer.lr=tag(log,interval(1e-4,1e-2))'"],
    "prepare": ["data=documents", "data.path={texts}", "mode.output={path}"],
    "convert_gguf": ["mode.path={gguf}", "mode.output={path}"],
}


@pytest.mark.parametrize("mode", OUTPUTS)
def test_an_output_that_takes_no_file_is_rejected_before_the_work(
    mode: str, run: Path, texts: Path, typed: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    values = {"path": tmp_path / "file/below", "run": run, "texts": texts, "gguf": tmp_path / "model.gguf"}
    overrides = [text.strip("'").format(**values) for text in OUTPUTS[mode]]
    if mode in ("evaluate", "export"):
        overrides.append(f"resume={run}")
    elif mode in ("preflight", "batch_find", "lr_find", "noise_scale"):
        overrides = [*typed, "trainer.accelerator=cpu", *overrides]
    assert execute(f"mode={mode}", *overrides) == 2
    output = capfd.readouterr().out
    assert "Traceback" not in output
    setting = overrides[-2 if mode in ("evaluate", "export", "diagnose", "report", "wandb_sweep") else -1]
    [named] = [line for line in output.splitlines() if str(tmp_path / "file/below") in line and line.startswith("1. ")]
    assert named.startswith(f"1. {setting.partition('=')[0]}=")
    assert f"it cannot be written to: {tmp_path / 'file'} is a file, not a folder" in output


def test_modes_that_read_no_sample_run_where_the_data_is_gone(
    run: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path / "cache"))
    gone = texts.rename(texts.with_name("elsewhere"))
    try:
        assert execute("mode=sample", "mode.max_new_tokens=2", f"resume={run}") == 0
        assert execute("mode=export", f"mode.path={tmp_path / 'export'}", f"resume={run}") == 0
        tasks = ("evaluator=lm_eval", "evaluator.tasks=[arc_easy]")
        for mode in (("mode=chat",), ("mode=plan",), ("mode=evaluate", *tasks)):
            assert compose_and_check([*mode, f"resume={run}"])[1] == []
        for mode in (("mode=evaluate",), ("mode=predict",), ("mode=replay",), ()):
            [mistake] = compose_and_check([*mode, f"resume={run}", f"hydra.run.dir={tmp_path / 'new'}"])[1]
            assert mistake.setting == f"data.path={texts}"
    finally:
        gone.rename(texts)
