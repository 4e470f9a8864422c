"""Options in one's own folder, added by `hydra.searchpath`, work wherever those of conf/ do."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support import TINY, execute, write_texts

import train
from recipes.config import compose_and_check
from recipes.config.check.config_folder import check_config_folder
from recipes.config.commands import resume_command
from recipes.config.compose import CONF, freeze
from recipes.config.search_path import OwnFolders
from recipes.config.trust import find_own_folders
from recipes.launcher.local import Local
from recipes.mode.wandb_sweep import _parse
from recipes.runtime.exit_codes import ExitCode
from recipes.sweep.command_line import check_command
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep

PATH = "hydra.searchpath=[own]"
OWN = ("model=mine", "data=my_texts", "data.path=texts", "callbacks=[default,stop_at]", "callbacks.stop_at.step=3")
WHOLE = (PATH, *OWN)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside a folder with a model, a data source and a recipe under names that conf/ does not have."""
    monkeypatch.chdir(tmp_path)
    nano = (CONF / "model/gpt2_nano.yaml").read_text()
    write("own/model/mine.yaml", nano)
    write("own/model/mine_wide.yaml", nano.replace("hidden_size: 192", "hidden_size: 384"))
    write("own/data/my_texts.yaml", (CONF / "data/text_files.yaml").read_text())
    write("own/callbacks/stop_at.yaml", "stop_at:\n  _target_: support.StopAt\n  step: 2\n")
    write("own/recipe/my_recipe.yaml", "# @package _global_\ntrainer:\n  max_steps: 7\n")
    write("texts/a.txt", "text " * 100)


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def check(*overrides: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(overrides)[1]]


def start(*overrides: str) -> Path:
    """Write the folder of a run with a checkpoint, as far as the config check looks at it."""
    composed, mistakes = compose_and_check([*overrides, "hydra.run.dir=run"])
    assert composed is not None
    assert mistakes == []
    folder = Path("run")
    write("run/checkpoints/step_0000001.ckpt/manifest.json", "{}")
    freeze(replace(composed, run_folder=folder))
    write("run/environment.json", json.dumps({"overrides": composed.overrides}))
    return folder


def test_a_run_with_own_options_is_composed_and_resumed_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    write("my_options/__init__.py", "raise AssertionError('only its files are read')")
    Path("my_options/conf").symlink_to("../own")
    monkeypatch.syspath_prepend(".")
    assert find_own_folders(["hydra.searchpath=[pkg://my_options.conf]"]) == [Path("own").resolve()]
    run = start(*WHOLE)
    for typed in ([], ["mode=evaluate", "hydra.searchpath=[file://own]"], ["mode=export"]):
        path = [] if any(text.startswith("hydra.") for text in typed) else [PATH]
        composed, mistakes = compose_and_check([f"resume={run}", *path, *typed])
        assert [str(mistake) for mistake in mistakes] == [], typed
        assert composed is not None
        assert composed.config["model"]["num_layers"] == 3
        assert composed.config["data"]["path"] == "texts"
        assert composed.config["callbacks"]["stop_at"]["step"] == 3
        assert composed.dropped_overrides == []


def test_a_run_of_an_own_model_and_an_own_source_is_evaluated_with_its_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = [text for text in TINY if not text.startswith(("data=", "eval_samples="))]
    small += ["model=mine", "data=my_texts", "eval_samples=null"]
    write_texts(Path("texts"))
    run = [PATH, *small, "data.path=texts", "trainer.max_steps=2", "hydra.run.dir=run"]
    assert execute(*run) == ExitCode.FINISHED
    val_loss = json.loads(Path("run/summary.json").read_text())["val_loss"]
    assert execute(PATH, "resume=run", "mode=evaluate") == ExitCode.FINISHED
    assert f"of the data: loss {val_loss:.4f}," in capsys.readouterr().out.splitlines()[-1]


def test_a_resumed_run_with_own_options_asks_for_their_folder_and_takes_it() -> None:
    run = start(*WHOLE)
    [mistake] = compose_and_check([f"resume={run}", "mode=evaluate"])[1]
    assert mistake.setting == "resume=run"
    assert mistake.reason.startswith(f"it has options of {Path('own').resolve()}, and only the command line")
    typed = shlex.split(mistake.fix.removeprefix("the same command with ").removesuffix(", if you trust it"))
    assert check(f"resume={run}", "mode=evaluate", *typed) == []
    Path("own").rename("moved")
    [mistake] = compose_and_check([f"resume={run}"])[1]
    assert mistake.fix == "the same command with 'hydra.searchpath=[<where they are now>]', if you trust it"
    assert check(f"resume={run}", "hydra.searchpath=[moved]") == []


def test_one_mistake_beside_own_options_is_one_mistake() -> None:
    [mistake] = check(*WHOLE, "model.num_layers=2", "optimizer=adamx")
    assert mistake.startswith("optimizer=adamx: ")
    [mistake] = check(*WHOLE, "seq_len=none_of_it")
    assert mistake.startswith("seq_len=none_of_it: ")
    run = start(*WHOLE)
    [mistake] = check(f"resume={run}", PATH, "model.num_layers=3", "optimizer.lrr=1")
    assert mistake == "optimizer.lrr=1: there is no 'optimizer.lrr'; type optimizer.lr=1"


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("model=mime", "model=mine"),
        ("data.path=texts", "data=my_texts data.path=texts, or data=documents data.path=texts"),
    ],
)
def test_own_options_are_suggested(typed: str, fix: str) -> None:
    [mistake] = compose_and_check([PATH, typed])[1]
    assert mistake.fix == fix
    assert check(PATH, *shlex.split(fix.partition(", or ")[0])) == []


def test_a_broken_own_file_is_not_blamed_on_this_repository() -> None:
    write("own/model/broken.yaml", "a: [")
    [mistake] = compose_and_check([PATH, "model=broken"])[1]
    assert mistake.setting == f"{Path('own').resolve()}/model/broken.yaml, line 1"
    write("own/model/typo.yaml", (CONF / "model/gpt2_nano.yaml").read_text() + "my_depth: 3\n")
    [mistake] = compose_and_check([PATH, "model=typo"])[1]
    assert mistake.fix.endswith(f"(in {Path('own').resolve()}/model/typo.yaml, line 10)"), mistake.fix


def test_a_changed_own_file_is_read_again() -> None:
    before, _ = compose_and_check([PATH, "model=mine"])
    write("own/model/mine.yaml", Path("own/model/mine.yaml").read_text().replace("num_layers: 3", "num_layers: 12"))
    after, _ = compose_and_check([PATH, "model=mine"])
    assert before is not None
    assert after is not None
    assert [run.config["model"]["num_layers"] for run in (before, after)] == [3, 12]


def test_own_options_are_swept_over() -> None:
    for swept in ("model=mine,mine_wide", "model=glob(mine*)"):
        command = check_command([PATH, swept], config_folder=CONF, config_name="config")
        assert command.mistakes == []
    command = check_command([PATH, "model=mine,nine"], config_folder=CONF, config_name="config")
    assert [(mistake.setting, mistake.fix) for mistake in command.mistakes] == [("model=nine", "model=mine")]
    sweep = Sweep(
        folder=Path("sweep"),
        launcher=Local(devices_per_job=None, max_jobs=None),
        settings=Settings(
            objective="best_val_loss",
            direction="minimize",
            retry_failed=False,
            skip_invalid=False,
            dashboard=[],
            compare=None,
        ),
        config_folder=CONF,
        config_name="config",
        keys=[],
        typed=["-m", PATH, "model=mine,mine_wide"],
    )
    prepared = [sweep.prepare([f"model={name}"], 0, str) for name in ("mine", "mine_wide")]
    assert [mistakes for _, mistakes in prepared] == [[], []]
    jobs = [job for job, _ in prepared]
    assert [job.composed.config["model"]["hidden_size"] for job in jobs if job.composed] == [192, 384]
    # what is printed as the best command, and recorded for a resumed sweep
    assert [job.overrides for job in jobs] == [[PATH, "model=mine"], [PATH, "model=mine_wide"]]


def test_an_agent_of_wandb_gets_own_options() -> None:
    composed, mistakes = compose_and_check(
        ["mode=wandb_sweep", PATH, "model=glob(mine*)", "sweep.objective=val_loss", "mode.path=sweep.yaml"]
    )
    assert mistakes == []
    assert composed is not None
    space, fixed, mistakes = _parse(composed)
    assert mistakes == []
    assert space.parameters["model"].options == ("mine", "mine_wide")
    assert PATH in fixed


def test_help_lists_own_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--help", PATH])
    assert train.main() == 0
    printed = capsys.readouterr().out
    assert OwnFolders.typed == ()
    assert "mine, mine_wide" in printed
    assert "my_recipe" in printed


def test_the_printed_command_that_resumes_names_the_folder() -> None:
    assert resume_command(Path("logs/my run"), WHOLE) == f"python train.py '{PATH}' 'resume=logs/my run'"
    assert resume_command(Path("logs/x"), ["seed=3"]) == "python train.py resume=logs/x"
    assert Path(start(*WHOLE), "config.yaml").read_text().startswith(f"# Run it again: python train.py '{PATH}' --")


def test_a_part_of_a_config_is_answered_with_a_recipe_of_ones_own() -> None:
    write("my/exp.yaml", "trainer:\n  max_steps: 7\n")
    _, [mistake] = compose_and_check([], config_folder=Path("my"), config_name="exp")
    assert mistake.setting == "--config-path my --config-name exp"
    assert mistake.reason.startswith("it is not the whole config of a run: it has no ")
    assert mistake.fix.startswith("'hydra.searchpath=[my]' recipe=exp, with the file as my/recipe/exp.yaml and ")
    write("my/recipe/exp.yaml", "# @package _global_\n" + Path("my/exp.yaml").read_text())
    composed, mistakes = compose_and_check(["hydra.searchpath=[my]", "recipe=exp"])
    assert mistakes == []
    assert composed is not None
    assert composed.config["trainer"]["max_steps"] == 7


def test_a_primary_config_of_ones_own_with_a_search_path_is_accepted_once_it_is_typed() -> None:
    defaults = f"defaults: [config, _self_]\nhydra: {{searchpath: ['file://{CONF}']}}\ntrainer: {{max_steps: 7}}\n"
    write("my/exp.yaml", defaults)
    [mistake] = check_config_folder(Path("my"), "exp", [])
    typed = shlex.split(mistake.fix.removesuffix(" if you trust all of it"))
    assert check_config_folder(Path("my"), "exp", typed) == []
    _, mistakes = compose_and_check([*typed, "model=gpt2_nan"], config_folder=Path("my"), config_name="exp")
    assert [mistake.fix for mistake in mistakes] == ["model=gpt2_nano"]
    composed, mistakes = compose_and_check(typed, config_folder=Path("my"), config_name="exp")
    assert mistakes == []
    assert composed is not None
    assert composed.config["trainer"]["max_steps"] == 7
