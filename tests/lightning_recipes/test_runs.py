"""Runs from Python leave the folder that the command leaves, and nothing else; mistakes read as on the command line."""

import base64
import doctest
import html
import json
import logging
import os
import re
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from safetensors.torch import load_file
from support import TINY, execute, read_metrics, write_texts

import lightning_recipes as lr
from lightning_recipes import runs
from recipes.config import compose_and_check
from recipes.errors import format_report

RUN = [*TINY, "trainer.accelerator=cpu", "trainer.max_steps=4", "eval_every=2", "save_every=2", "ema_decay=0.5"]
TIMED = re.compile(r"time/|throughput/|memory/")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> lr.RecordedRun:
    folder, texts = tmp_path_factory.mktemp("python") / "mine", tmp_path_factory.getbasetemp() / "texts"
    return lr.compose(*RUN, f"data.path={write_texts(texts)}", f"hydra.run.dir={folder}").fit()


def describe_process() -> list[Any]:
    """Return what of this process a library must leave as it was."""
    logger = logging.getLogger("lightning_recipes")
    noisy = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    state = [logger.level, logger.propagate, list(logger.handlers), noisy.level, list(warnings.filters)]
    return [*state, os.getcwd(), list(sys.argv), signals, sys.stdout, sys.stderr]


def test_the_rows_and_the_config_are_those_of_the_command(
    run: lr.RecordedRun, text_folder: str, tmp_path: Path
) -> None:
    assert execute(*RUN, f"data.path={text_folder}", f"hydra.run.dir={tmp_path}") == 0

    def select(rows: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{name: value for name, value in row.items() if not TIMED.match(name)} for row in rows]

    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert select(run.rows) == select(read_metrics(tmp_path))
    assert (run.folder / "config.yaml").read_text() == (tmp_path / "config.yaml").read_text()
    ours, theirs = (
        json.loads((folder / "environment.json").read_text())["overrides"] for folder in (run.folder, tmp_path)
    )
    assert ours[:-1] == theirs[:-1]
    last = "checkpoints/step_0000004.ckpt"
    weights, expected = (
        {file.name: load_file(file) for file in sorted((folder / last).glob("*.safetensors"))}
        for folder in (run.folder, tmp_path)
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[file][name]) for file in weights for name, tensor in weights[file].items())


def test_training_and_loading_leave_nothing_in_the_process(
    text_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before, handler = describe_process(), logging.NullHandler()
    logging.getLogger("lightning_recipes").addHandler(handler)
    try:
        composed = lr.compose(*RUN, f"data.path={text_folder}", "trainer.max_steps=2", "name=mine")
        assert list(tmp_path.iterdir()) == [], "composing makes no folder"
        first, second = composed.fit(), composed.fit()
        assert "step 2/2  loss" in capsys.readouterr().out
        random = torch.get_rng_state()
        first.load()
        assert torch.equal(torch.get_rng_state(), random)
        assert logging.getLogger("lightning_recipes").handlers[-1] is handler
    finally:
        logging.getLogger("lightning_recipes").removeHandler(handler)
    assert describe_process() == before
    # two starts of one composed run have a folder each, as two commands of the same second
    assert second.folder.name == f"{first.folder.name}_2"
    assert first.folder.parent == Path("logs/mine")


def test_wrong_overrides_are_one_exception_with_the_text_of_the_command_line(tmp_path: Path) -> None:
    typed = ["optimizer.lr=fast", "modle=gpt2", f"hydra.run.dir={tmp_path / 'new'}"]
    with pytest.raises(lr.InvalidConfigError) as caught:
        lr.compose(*typed)
    assert str(caught.value) == format_report(compose_and_check(typed)[1])
    assert str(caught.value).startswith("The config has 2 mistakes; nothing was built.\n\n1. ")
    assert not (tmp_path / "new").exists()


def test_a_class_that_was_edited_between_two_calls_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "import torch\n\nclass Mine(torch.nn.Module):\n    input_kind = 'images'\n    def __init__(self, *, {}): ...\n"
    )
    typed = ["model=resnet18", "~model.small_images", "~model.in_channels", "model._target_=edited_model.Mine"]
    (tmp_path / "edited_model.py").write_text(source.format("width: int"))
    with pytest.raises(lr.InvalidConfigError, match="width"):
        lr.compose(*typed)
    (tmp_path / "edited_model.py").write_text(source.format("num_classes: int"))
    os.utime(tmp_path / "edited_model.py", (1, 1))  # the two may have been written in one tick of the file system
    assert lr.compose(*typed).config["model"]["num_classes"] == 10


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["-m", "optimizer.lr=1e-3,2e-3"], "python train.py -m optimizer.lr=1e-3,2e-3"),
        (["sweep=optuna_lr"], "python train.py sweep=optuna_lr"),
        (["pipeline=chat_nano", "seed=1"], "python train.py pipeline=chat_nano seed=1"),
        (["launcher.max_jobs=2"], "the same command without it, or -m beside it"),
    ],
)
def test_sweeps_pipelines_and_flags_are_answered_with_the_command(overrides: list[str], fix: str) -> None:
    with pytest.raises(lr.InvalidConfigError) as caught:
        lr.compose(*overrides)
    assert str(caught.value).splitlines()[-1] == f"   type: {fix}"


def test_a_mode_that_does_not_train_is_answered_with_its_command(run: lr.RecordedRun) -> None:
    composed = lr.compose("mode=evaluate", f"resume={run.folder}")
    with pytest.raises(lr.InvalidConfigError) as caught:
        composed.fit()
    assert str(caught.value).splitlines()[-1] == f"   type: python train.py mode=evaluate resume={run.folder}"


def test_a_program_that_a_launcher_started_per_rank_is_answered_with_the_command(
    text_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    composed = lr.compose(*RUN, f"data.path={text_folder}", "strategy=ddp")
    with pytest.raises(lr.InvalidConfigError, match="torchrun has started this program once per rank"):
        composed.fit()


def test_a_crash_is_an_exception_with_its_cause_and_is_printed_once(
    run: lr.RecordedRun, text_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = lr.compose(
        *RUN, f"data.path={text_folder}", f"hydra.run.dir={tmp_path / 'run'}",
        "+callbacks.crash._target_=support.CrashAt", "+callbacks.crash.step=1",
    )  # fmt: skip
    with pytest.raises(lr.RunError) as caught:
        composed.fit()
    assert (caught.value.exit_code, caught.value.folder) == (1, tmp_path / "run")
    assert isinstance(caught.value.__cause__, OSError)
    where = f"support.CrashAt.on_train_batch_start failed, {support.__file__} line "
    assert where in str(caught.value)
    assert "OSError: crash at 1; its log is " in str(caught.value)
    assert "Traceback" not in "".join(capsys.readouterr()), "Python prints that of the exception"
    assert "Traceback" in (tmp_path / "run" / "train.log").read_text()
    ended = lr.read(caught.value.folder).events[-1]
    assert ended["status"] == "failed"
    assert ended["error"].startswith(where)
    with pytest.raises(lr.InvalidConfigError, match="the folder contains a run, which this one would overwrite"):
        lr.compose(*RUN, f"data.path={text_folder}", f"hydra.run.dir={run.folder}")


def test_the_weights_are_those_of_the_checkpoint_and_their_average_is_another(
    run: lr.RecordedRun, text_folder: str, tmp_path: Path
) -> None:
    """Written down by hand: the average of decay 0.5 lags behind weights that moved in every step."""
    model, average = run.load(), lr.load(run.folder / "checkpoints" / "last", weights="ema")
    saved = {}
    for file in (run.folder / "checkpoints/step_0000004.ckpt").glob("*.safetensors"):
        saved |= load_file(file)
    for name, weight in model.named_parameters():
        found = [tensor for key, tensor in saved.items() if key.endswith(name) and tensor.shape == weight.shape]
        assert any(torch.equal(weight, tensor) for tensor in found), name
    differ = [not torch.equal(one, two) for one, two in zip(model.parameters(), average.parameters(), strict=True)]
    assert all(differ)
    assert not model.training
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    text: Any = model.tokenizer
    assert text.decode(text.encode("a = 1")) == "a = 1"
    tokens = torch.tensor([text.encode("a = 1")])  # [1, T]
    best, of_folder = lr.load(run, weights="best"), lr.load(run.folder / "checkpoints" / "best")
    with torch.no_grad():
        assert torch.equal(model(tokens), lr.load(run.folder)(tokens))
        assert torch.equal(best(tokens), of_folder(tokens))


def test_the_weights_are_read_without_the_data_and_those_that_are_not_there_are_a_mistake(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    overrides = [*RUN, f"data.path={texts}", f"hydra.run.dir={tmp_path / 'run'}", "trainer.max_steps=1"]
    run = lr.compose(*overrides, "ema_decay=null").fit()
    before = run.load().state_dict()
    shutil.rmtree(texts)
    after = lr.load(tmp_path / "run").state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    unknown: Any = "emma"
    for weights, typed, text in [
        (unknown, [], 'type: weights="ema"'),
        ("ema", [], "type: weights=trained"),
        ("trained", ["model=gpt3"], "1. model=gpt3"),
    ]:
        with pytest.raises(lr.InvalidConfigError, match=re.escape(text)):
            run.load(*typed, weights=weights)
    with pytest.raises(lr.InvalidConfigError, match=re.escape("load('nothing')")):
        lr.load("nothing")


def test_a_model_of_images_has_no_tokenizer_and_a_class_that_only_the_folder_names_is_not_run(tmp_path: Path) -> None:
    target = "model._target_=small_models.SmallClassifier"
    overrides = ["model=resnet18", target, "trainer.max_steps=1", "global_batch_size=4", "eval_samples=4"]
    run = lr.compose(*overrides, "callbacks=[]", "trainer.accelerator=cpu", f"hydra.run.dir={tmp_path / 'run'}").fit()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # as if from elsewhere
    with pytest.raises(lr.InvalidConfigError, match=re.escape(f"type: ++{target} if you trust it")):
        lr.load(tmp_path / "copy")
    model = lr.load(tmp_path / "copy", f"++{target}")
    # the class of a run that was composed here has been typed, and not what somebody writes into its folder since
    assert torch.equal(model.state_dict()["head.weight"], run.load().state_dict()["head.weight"])
    again = lr.compose(f"resume={run.folder}", "trainer.max_steps=2")
    assert again.config["model"]["_target_"] == "small_models.SmallClassifier"
    text = (run.folder / "config.yaml").read_text()
    (run.folder / "config.yaml").write_text(text.replace("SmallClassifier", "Other"))
    with pytest.raises(lr.InvalidConfigError, match="may not choose the code"):
        run.load()
    (run.folder / "config.yaml").write_text(text.replace("small_models.", "not_here."))
    with pytest.raises(lr.InvalidConfigError) as caught:
        run.load()
    assert str(caught.value).splitlines()[-1] == (
        '   type: sys.path.insert(0, "<the folder with not_here>"), and the same call with'
        " '++model._target_=not_here.SmallClassifier' if you trust it"
    )
    assert model.tokenizer is None
    with torch.no_grad():
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_frame_has_the_rows_by_step(run: lr.RecordedRun) -> None:
    pandas = pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert list(frame.index) == [1, 2, 3, 4]
    assert list(frame["train/loss"]) == [row["train/loss"] for row in run.rows]
    assert list(pandas.isna(frame["val/loss"])) == [True, False, True, False]


def test_a_run_that_goes_on_is_read_as_far_as_it_is(run: lr.RecordedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "copy")
    (tmp_path / "copy" / "summary.json").unlink()
    with (tmp_path / "copy" / "metrics.csv").open("a") as file:
        file.write("5,1.2")  # a row that is being written
    found = lr.read(tmp_path / "copy")
    assert (found.rows, found.summary) == (run.rows, {})
    assert [event["event"] for event in run.events][:1] == ["start"]
    assert run.summary["status"] == "finished"
    assert run.config["seed"] == 1234
    assert "not ended" in found._repr_html_()


def test_damaged_files_are_a_mistake_that_names_the_file(run: lr.RecordedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "copy")
    (tmp_path / "copy" / "events.jsonl").write_text("{\n")
    with pytest.raises(lr.InvalidConfigError, match=r"events.jsonl\n +line 1 is not valid JSON"):
        lr.read(tmp_path / "copy")


def test_a_notebook_shows_the_curves_and_the_report(run: lr.RecordedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "a<b>")
    from callbacks import write_report

    write_report(tmp_path / "a<b>")
    shown = lr.read(tmp_path / "a<b>")._repr_html_()
    [picture] = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    assert base64.b64decode(picture) == (tmp_path / "a<b>" / "curves.png").read_bytes()
    [page] = re.findall(r'srcdoc="([^"]*)"', shown)
    assert html.unescape(page) == (tmp_path / "a<b>" / "report.html").read_text()
    assert 'sandbox="allow-scripts"' in shown, "a report of somebody else's run reads nothing of the notebook"
    head = shown.partition("</p>")[0]
    assert f"val loss {run.summary['val_loss']:,.6g}" in head
    assert "a&lt;b&gt;" in head
    assert "the callback" not in shown
    for name in ("curves.png", "report.html"):  # as if the run had been resumed without the callback since
        os.utime(tmp_path / "a<b>" / name, (1, 1))
    shown = lr.read(tmp_path / "a<b>")._repr_html_()
    assert "the callback <code>report</code> draws it" in shown
    assert "<img" not in shown
    assert "<iframe" not in shown


def test_a_plan_has_the_figures_of_the_command(
    text_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*RUN, f"data.path={text_folder}", "plan.hardware=h100x8", "mode.advise=false"]
    before = describe_process()
    plan = lr.plan(*overrides)
    assert describe_process() == before
    assert capsys.readouterr() == ("", "")
    assert execute("mode=plan", f"mode.path={tmp_path}", *overrides) == 0
    assert plan.record == json.loads((tmp_path / "plan.json").read_text())
    assert str(plan) == capsys.readouterr().out.rpartition(str(tmp_path / "plan.html"))[0].rstrip("\n")
    assert "srcdoc" in plan._repr_html_()
    with pytest.raises(lr.InvalidConfigError, match="type: plan\\(\\) without mode=fit"):
        lr.plan("mode=fit")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "my_texts")
    return tmp_path


@pytest.mark.parametrize("name", ["compose", "load", "plan", "read"])
def test_the_example_of_a_function_runs(name: str, workplace: Path) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    [example] = finder.find(getattr(runs, name), name, runs)
    assert example.examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0
