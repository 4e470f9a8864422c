"""Debug options: each works with every recipe; what it writes, finds or memorizes is checked in real runs."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from started import Started
from support import ROOT, TINY, composed_config, needed_by, read_metrics, run_train

from recipes.config import compose_and_check
from recipes.config.check import strategy as engines

OPTIONS = sorted(path.stem for path in (ROOT / "conf/debug").glob("*.yaml"))
RECIPES = sorted(path.stem for path in (ROOT / "conf/recipe").glob("*.yaml"))
ENGINES = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "deepspeed_stage_2": 2,
}
DIVIDED = ("tp_bf16", "fsdp_tp_bf16", "cp_bf16", "ep_bf16", "pp_bf16", "fsdp_tp_pp_bf16")  # recipes of several ranks
# debug=fast_dev_run is there for the report and the sample, too
WHOLE = [override for override in TINY if not override.startswith("~")]


def engine(name: str) -> list[str]:
    return [f"strategy={name}", f"trainer.devices={ENGINES[name]}", "trainer.accelerator=cpu"]


# every recipe once, with the options in turn; all pairs in `make test-long`
ONCE = set(zip(RECIPES, itertools.cycle(OPTIONS), strict=False))


@pytest.mark.parametrize(
    ("recipe", "option"),
    [
        pytest.param(*pair, marks=[] if pair in ONCE else [pytest.mark.slow])
        for pair in itertools.product(RECIPES, OPTIONS)
    ],
)
def test_every_recipe_takes_every_debug_option(
    recipe: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "check_toolchain", lambda *_, **__: ())
    ranks = ["trainer.devices=4", "trainer.accelerator=cpu"] if recipe in DIVIDED else []
    typed = [f"recipe={recipe}", f"debug={option}", *needed_by(recipe, tmp_path), *ranks]
    composed, mistakes = compose_and_check(typed)
    assert composed is not None
    assert not mistakes, [str(mistake) for mistake in mistakes]
    name = recipe if option == "none" else f"debug_{option}"
    assert composed.config["name"] == name
    assert composed.run_folder.parts[:2] == ("logs", name)


def test_a_debug_option_overrides_the_recipe_and_the_command_line_overrides_both() -> None:
    assert composed_config("recipe=quickstart", "debug=fast_dev_run")["trainer"]["max_steps"] == 1
    typed = composed_config("recipe=quickstart", "debug=fast_dev_run", "trainer.max_steps=2")
    assert typed["trainer"]["max_steps"] == 2
    overfit = composed_config("debug=overfit", "optimizer=sgd", "scheduler=warmup_cosine")
    assert overfit["optimizer"]["weight_decay"] == 0.0
    assert overfit["scheduler"]["_target_"].endswith(".warmup_cosine")


def test_debug_nan_is_read_as_the_name_of_an_option() -> None:
    config = composed_config("debug=nan")
    assert config["trainer"]["detect_anomaly"] is True
    assert config["callbacks"]["loss_spike"] is None
    assert config["compile"] is False
    done = run_train(["debug=nan", "--cfg", "job"])
    assert done.returncode == 0, done.stderr
    assert "name: debug_nan" in done.stdout


def test_no_model_has_dropout_by_default_so_overfit_need_not_disable_it() -> None:
    for path in (ROOT / "conf/model").glob("*.yaml"):
        if path.stem == "huggingface":  # has what its own config.json says
            continue
        config = composed_config(f"model={path.stem}", "debug=overfit")
        dropout = config["model"]["dropout"] if "dropout" in config["model"] else 0.0
        assert dropout == 0.0


@pytest.mark.parametrize("strategy", ENGINES)
def test_a_fast_dev_run_validates_saves_samples_and_reports_after_one_step(
    strategy: str, tmp_path: Path, text_folder: str
) -> None:
    run = tmp_path / "run"
    overrides = [*WHOLE, f"data.path={text_folder}", *engine(strategy), f"hydra.run.dir={run}"]
    done = run_train([*overrides, "debug=fast_dev_run"])
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["val_loss"] is not None
    assert (run / "checkpoints/step_0000001.ckpt/manifest.json").is_file()
    assert len((run / "samples.jsonl").read_text().splitlines()) == 2
    assert (run / "report.html").is_file()
    assert (run / "curves.png").is_file()


def test_a_fast_dev_run_of_images_needs_no_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = run_train(["model=resnet18", "debug=fast_dev_run", f"hydra.run.dir={run}"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "checkpoints/step_0000001.ckpt/manifest.json").is_file()


def test_limit_validates_and_saves_four_times_and_keeps_what_a_run_keeps(tmp_path: Path, text_folder: str) -> None:
    run = tmp_path / "run"
    overrides = [*TINY, f"data.path={text_folder}", f"hydra.run.dir={run}"]
    done = run_train([*overrides, "debug=limit"])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(run)
    assert len(rows) == 20
    assert [row["step"] for row in rows if "val/loss" in row] == [5, 10, 15, 20]
    saved = (run / "events.jsonl").read_text().count('"event": "checkpoint"')
    assert saved == 4
    kept = {path.name for path in (run / "checkpoints").glob("step_*.ckpt")}
    assert {"step_0000015.ckpt", "step_0000020.ckpt"} <= kept
    assert len(kept) <= 3  # the newest two and the best


def test_profiler_leaves_a_trace_and_saves_nothing(tmp_path: Path, text_folder: str) -> None:
    run = tmp_path / "run"
    overrides = [*TINY, f"data.path={text_folder}", f"hydra.run.dir={run}"]
    done = run_train([*overrides, "debug=profiler"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "profile/rank_00000.trace.json.gz").is_file()
    assert "profile: 3 steps in" in done.stdout
    assert not list((run / "checkpoints").glob("step_*.ckpt"))


@pytest.mark.parametrize("devices", [1, 2])
def test_overfit_memorizes_a_batch_of_text(devices: int, tmp_path: Path, text_folder: str) -> None:
    run = tmp_path / "run"
    overrides = [*TINY, f"data.path={text_folder}", f"hydra.run.dir={run}"]
    overrides += engine("single" if devices == 1 else "ddp")
    done = run_train([*overrides, "debug=overfit"])
    assert done.returncode == 0, done.stdout + done.stderr
    line = "overfit: training repeats its first 8 samples and validation uses the same ones"
    assert done.stdout.count(line) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["train_loss"] < 0.05
    assert summary["val_loss"] < 0.05
    assert not list((run / "checkpoints").glob("step_*.ckpt"))


def test_overfit_memorizes_a_batch_of_digits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["model=resnet18", "data=digits", "global_batch_size=4", f"hydra.run.dir={run}"]
    done = run_train([*overrides, "debug=overfit", "~callbacks.report", "trainer.max_steps=80"])
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["train_loss"] < 0.01
    assert summary["val_loss"] < 0.01  # the running statistics have converged to those of the batch


def nan_run(run: Path, text_folder: str, strategy: str, *overrides: str) -> Started:
    """A run with `debug=nan` whose last rank makes a NaN in its third step."""
    model = ["model._target_=nan_model.NanGPT2", "+model.at_pass=3"]
    model += [f"+model.on_rank={ENGINES[strategy] - 1}"]
    folder = [f"data.path={text_folder}", f"hydra.run.dir={run}", "trainer.max_steps=6"]
    overrides = (*TINY, *folder, *model, *engine(strategy), "debug=nan", *overrides)
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    return Started(command, folder=run.parent, paths=[ROOT / "tests"])


@pytest.mark.parametrize(
    ("strategy", "born_in"),
    [(name, born_in) for name in ENGINES for born_in in ("forward", "backward")],
)
def test_a_nan_ends_the_run_and_its_forward_line_is_named(
    strategy: str, born_in: str, tmp_path: Path, text_folder: str
) -> None:
    run = tmp_path / "run"
    started = nan_run(run, text_folder, strategy, f"+model.born_in={born_in}")
    said = started.end()
    assert started.process.returncode == 1, said
    assert f"step 3, rank {ENGINES[strategy] - 1}:" in said
    lines = {
        "forward": "in forward: return out + gap / gap  # 0 / 0",
        "backward": "in forward: return out + torch.where(gap == 0, gap, gap.sqrt())",
    }
    [line] = [line for line in said.splitlines() if lines[born_in] in line]
    assert "nan_model.py, line " in line
    assert [row["step"] for row in read_metrics(run)] == [1, 2]


def test_a_run_resumed_with_debug_nan_is_not_changed(tmp_path: Path, text_folder: str) -> None:
    run = tmp_path / "run"
    overrides = [*TINY, f"data.path={text_folder}", "warmup_steps=1", "save_every=2", "eval_every=2"]
    done = run_train([*overrides, "trainer.max_steps=4", f"hydra.run.dir={run}"], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = run_train([f"resume={run}/checkpoints/step_0000002.ckpt", "debug=nan"], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [own] = (tmp_path / "logs/debug_nan").iterdir()
    assert [row["step"] for row in read_metrics(own)] == [3, 4]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
