"""Run folders and config folders of somebody else: nothing that only they name is executed, read or written."""

import copy
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import train
from recipes.config import compose_and_check
from recipes.config.check.config_folder import check_config_folder
from recipes.config.check.origin import check_origin, list_untrusted
from recipes.config.compose import Composed, compose_run, freeze, register_resolvers
from recipes.config.instantiate import make
from recipes.config.trust import restrict_variables

TYPED = ["tokenizer=bytes", "model.vocab_size=257", "logger=wandb"]
COMMAND = {"_target_": "os.system", "command": "touch executed"}
STOP = {"_target_": "support.StopAt", "step": 3}
FOLDER = Path("run/config.yaml")
Config = dict[str, Any]


@pytest.fixture(scope="module")
def composed() -> Composed:
    return compose_run(TYPED)


@pytest.fixture
def run(composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the folder of a run with a checkpoint, as far as the config check looks at it; work beside it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_0000001.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    freeze(replace(composed, run_folder=folder))
    (folder / "environment.json").write_text(json.dumps({"overrides": TYPED}))
    return folder


def change(config: Config, changes: Config) -> Config:
    """Return a config with other values, given by their dotted keys."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = config
        for section in sections:
            node = node[section]
        node[last] = value
    return config


def forge(run: Path, changes: Config) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(change(config, changes)))


def settings(config: Config, *typed: str) -> list[str]:
    """Return the settings of a folder's config that are rejected."""
    return [mistake.setting for mistake in check_origin(config, typed, FOLDER)]


def rejected(overrides: list[str], **where: Any) -> list[str]:
    """Return the settings that are rejected when a run is composed."""
    _, mistakes = compose_and_check(overrides, **where)
    return [mistake.setting for mistake in mistakes]


NAMES = ("~/my_model", "out (1)", "it's", "a=b", "a[1]", "{x}", "é", "a#b", "a~b", "3", "true", "[a]", "null_")


def test_a_file_with_any_name_that_was_typed_is_written(run: Path) -> None:
    where = [f"resume={run}", "mode=export"]
    for name in NAMES:
        assert rejected([*where, f"mode.path={name}"]) == [], name
    forge(run, {"mode": {"_target_": "recipes.mode.export.export", "_partial_": True, "path": "3"}})
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert settings(config) == ["mode.path='3'"]
    assert settings(config, "mode.path=3") == []
    assert settings(config, "mode.path=4") == ["mode.path='3'"]


def test_a_repository_that_a_folder_names_gets_nothing(run: Path) -> None:
    forge(run, {"mode": {"_target_": "recipes.mode.export.export", "_partial_": True, "push_to": "else/where"}})
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert settings(config) == ["mode.push_to=else/where"]
    assert settings(config, "mode.push_to=else/where") == []


FORGED: dict[str, tuple[Config, str]] = {
    "a callback": ({"callbacks.x": COMMAND}, "callbacks.x._target_=os.system"),
    "precision": ({"precision": COMMAND}, "precision._target_=os.system"),
    "checkpoint": ({"checkpoint._target_": "subprocess.check_output"}, "checkpoint._target_=subprocess.check_output"),
    "the project's own function": (
        {"model": {"_target_": "recipes.runtime.environment._run", "command": ["touch", "executed"]}},
        "model._target_=recipes.runtime.environment._run",
    ),
    "a node within a node": ({"data.tokenizer": COMMAND}, "data.tokenizer._target_=os.system"),
    "a node as an argument": ({"trainer.profiler": COMMAND}, "trainer.profiler._target_=os.system"),
    "a node in a list": ({"trainer.plugins": [[COMMAND]]}, "trainer.plugins.0.0._target_=os.system"),
    "a node where none is": ({"tags": [COMMAND]}, "tags.0._target_=os.system"),
    "a constructor of another group": (
        {"model._target_": "recipes.logger.csv.CsvLogger"},
        "model._target_=recipes.logger.csv.CsvLogger",
    ),
    "a constructor of another place of its group": (
        {"sweep": {"_target_": "callbacks.report.compare.page.write_comparison", "_partial_": True}},
        "sweep._target_=callbacks.report.compare.page.write_comparison",
    ),
    "a call in place of a partial": (
        {"strategy._partial_": False},
        "strategy._target_=recipes.strategy.single.SingleDevice",
    ),
    "positional arguments": ({"precision._args_": ["bf16-true"]}, "precision._args_=…"),
    "a list as a constructor": ({"precision._target_": ["os.system"]}, "precision._target_=[os.system]"),
    "a constructor by interpolation": ({"model._target_": "${name}"}, "model._target_=${name}"),
    "shell lines": ({"launcher.setup": ["touch executed"]}, "launcher.setup=[touch executed]"),
    "options of sbatch": ({"launcher.directives": {"wrap": "id"}}, "launcher.directives={wrap:id}"),
    "a line in an option of sbatch": ({"launcher.partition": "a\ntouch b"}, "launcher.partition='a\ntouch b'"),
    "a file to write": (
        {"mode": {"_target_": "recipes.mode.dashboard.dashboard", "_partial_": True, "path": "../.bashrc"}},
        "mode.path=../.bashrc",
    ),
    "a list in itself": ({"tags": yaml.safe_load("&a [*a]")}, str(FOLDER)),
    "a section in itself": ({"tags": yaml.safe_load("&a {b: *a}")}, str(FOLDER)),
    "billions of values": (
        {"tags": yaml.safe_load("[&x0 [1]" + "".join(f", &x{n + 1} [{f'*x{n}, ' * 10}]" for n in range(12)) + "]")},
        str(FOLDER),
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_config_of_somebody_else_cannot_choose_code_or_files(name: str, composed: Composed) -> None:
    changes, setting = FORGED[name]
    assert settings(change(composed.config, changes))[:1] == [setting]
    assert settings(composed.config) == []


@pytest.mark.parametrize("typed", [["mode=sample"], ["mode=export", "seed=2", "model=llama_nano"], []], ids=len)
def test_a_run_folder_is_checked_however_it_is_named(typed: list[str], run: Path) -> None:
    forge(run, {"callbacks.x": COMMAND})
    # what the folder records as its command line has not been typed on this one
    (run / "environment.json").write_text(json.dumps({"overrides": [*TYPED, "++callbacks.x._target_=os.system"]}))
    assert rejected([f"resume={run}", *typed]) == ["callbacks.x._target_=os.system"]
    if not typed:
        assert rejected([f"resume='{run}/checkpoints/step_0000001.ckpt'"]) == ["callbacks.x._target_=os.system"]
        assert rejected([], config_folder=run) == ["callbacks.x._target_=os.system"]
    assert not Path("executed").exists()


def test_what_is_typed_on_this_command_line_is_trusted(composed: Composed) -> None:
    forged = change(composed.config, {"callbacks.x": STOP, "launcher.setup": ["module load x", "y"]})
    callback, setup = "callbacks.x._target_=support.StopAt", "launcher.setup=[module load x,y]"
    assert settings(forged) == [callback, setup]
    assert settings(forged, "++callbacks.x={_target_: support.StopAt, step: 3}") == [setup]
    assert settings(forged, f"++{callback}", f"++{setup}") == []
    # in another place, or another value
    assert settings(forged, "++callbacks.y._target_=support.StopAt", "launcher.setup=[y]") == [callback, setup]
    directives = change(composed.config, {"launcher.directives": {"account": "a", "qos": "b"}})
    assert settings(directives, "launcher.directives.account=a", "launcher.directives.qos=b") == []
    assert settings(directives, "launcher.directives.account=a") == ["launcher.directives={account:a,qos:b}"]


def test_the_error_says_who_names_it_and_what_to_type(composed: Composed) -> None:
    [mistake] = check_origin(change(composed.config, {"callbacks.x": STOP}), [], FOLDER)
    assert str(mistake) == (
        "callbacks.x._target_=support.StopAt: run/config.yaml sets it, and a folder may not choose the code that runs:"
        " no file in conf/callbacks names it there; type ++callbacks.x._target_=support.StopAt if you trust it"
    )


def test_all_classes_of_a_folder_are_one_mistake_and_one_line_to_type(composed: Composed) -> None:
    """The line is accepted as it is, and there is another mistake for what is no code."""
    changes = {"callbacks.x": STOP, "model._target_": "small_models.SmallClassifier", "launcher.setup": ["y"]}
    forged = change(composed.config, changes)
    classes, setup = check_origin(forged, [], FOLDER)
    assert classes.fix == (
        "++callbacks.x._target_=support.StopAt ++model._target_=small_models.SmallClassifier if you trust it"
    )
    assert setup.setting == "launcher.setup=[y]"
    assert classes.fix.replace("++", "").startswith(classes.setting)
    words = shlex.split(classes.fix.removesuffix(" if you trust it"))
    assert list_untrusted(forged, [], FOLDER) == words
    assert settings(forged, *words) == ["launcher.setup=[y]"]
    assert list_untrusted(forged, words, FOLDER) == []


def test_a_package_that_is_not_found_is_a_folder_to_name(run: Path) -> None:
    forge(run, {"model._target_": "src_of_mine.models.Net", "callbacks.x": STOP})
    _, [mistake] = compose_and_check([f"resume={run}"])
    assert mistake.reason.endswith("; no package src_of_mine is found here")
    assert mistake.fix == (
        f"PYTHONPATH=<the folder with src_of_mine> python train.py resume={run}"
        " ++callbacks.x._target_=support.StopAt ++model._target_=src_of_mine.models.Net if you trust it"
    )
    _, [mistake] = compose_and_check([], config_folder=run)
    assert mistake.fix.startswith("PYTHONPATH=<the folder with src_of_mine> before the same command, and ++callbacks")


def test_what_no_config_can_name_is_not_to_be_typed(composed: Composed) -> None:
    [mistake] = check_origin(change(composed.config, {"callbacks.x": COMMAND}), [], FOLDER)
    assert mistake.reason.endswith("names it there, and none can (os: 'os' is part of Python itself)")
    assert mistake.fix == "a folder written by a run"


def test_an_own_run_resumes_without_a_word_and_what_it_was_started_with_is_typed_again(run: Path) -> None:
    assert rejected([f"resume={run}"]) == []
    assert rejected([], config_folder=run) == []
    forge(run, {"callbacks.x": STOP})
    (run / "environment.json").write_text(json.dumps({"overrides": [*TYPED, "+callbacks.x._target_=support.StopAt"]}))
    assert rejected([f"resume={run}", "++callbacks.x._target_=support.StopAt"]) == []


def test_a_folder_of_the_typed_search_path_is_trusted(run: Path, tmp_path: Path) -> None:
    forge(run, {"callbacks.x": STOP})
    own = tmp_path / "own" / "callbacks"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("x:\n  _target_: support.StopAt\n")
    assert rejected([f"resume={run}", f"hydra.searchpath=[file://{own.parent}]"]) == []


# --- secrets ---


def test_a_frozen_config_reads_no_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    node = {"_target_": "recipes.logger.wandb.logger.WandbLogger", "_partial_": True, "project": "${oc.env:SECRET}"}
    assert make(node).keywords["project"] == "${oc.env:SECRET}"
    nested = {"_target_": "builtins.dict", "lines": ["${oc.env:SECRET}"], "node": node}
    assert make(nested)["lines"] == ["${oc.env:SECRET}"]
    assert make(nested)["node"].keywords["project"] == "${oc.env:SECRET}"


@pytest.mark.parametrize(
    "text",
    ["${oc.env:SECRET}", "${oc.env:SECRET,none}-${now:%f}", "${oc.decode:'\\${oc.env:SECRET}'}", "${oc.env:${name}}"],
)
def test_an_interpolation_of_somebody_else_reads_no_unknown_variable(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("RECIPES_CACHE", "cache")
    config = OmegaConf.create({"name": "SECRET", "text": text, "known": "${oc.env:RECIPES_CACHE}"})
    register_resolvers(restrict_variables([]))
    with pytest.raises(OmegaConfBaseException, match="SECRET may be a secret: neither conf/ nor this command line"):
        str(config.text)
    assert config.known == "cache"
    register_resolvers(restrict_variables(["name=${oc.env:SECRET}"]))
    assert "hunter2" in config.text
    register_resolvers()
    assert "hunter2" in config.text


def test_a_recorded_override_and_a_config_folder_read_no_unknown_variable(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = "${oc.env:SECRET}-${now:%f}"
    (run / "environment.json").write_text(json.dumps({"overrides": [*TYPED, f"logger.wandb.project='{text}'"]}))
    assert rejected([f"resume={run}"]) == ["logger.wandb.project=…"]
    forge(run, {"logger.wandb.project": text})
    assert rejected([], config_folder=run) == ["logger.wandb.project=…"]


def test_a_dollar_sign_that_the_user_has_escaped_is_text() -> None:
    prompts = compose_run([r"callbacks.sample_text.prompts=[\${HOME}]"]).config["callbacks"]["sample_text"]
    assert make(prompts).prompts == ["${HOME}"]


# --- what Hydra itself would do ---


HYDRA: dict[str, tuple[Config, str]] = {
    "its callbacks": ({"callbacks": {"x": COMMAND}}, "hydra.callbacks.x._target_=os.system"),
    "its log": (
        {"job_logging": {"version": 1, "formatters": {"x": {"()": "os.system", "command": "touch executed"}}}},
        "hydra.job_logging.formatters.x.()=os.system",
    ),
    "its sweeper": ({"sweeper": {"_target_": "os.system"}}, "hydra.sweeper._target_=os.system"),
    "its launcher": ({"launcher": {"_target_": "os.system"}}, "hydra.launcher._target_=os.system"),
    "its search path": ({"searchpath": ["pkg://this"]}, "hydra.searchpath=…"),
    "its environment": ({"job": {"env_set": {"LD_PRELOAD": "x"}}}, "hydra.job.env_set.LD_PRELOAD=x"),
    "swept values": ({"sweeper": {"params": {"mode.path": "a,b"}}}, "hydra.sweeper.params.mode.path='a,b'"),
    "the folder of the run": ({"run": {"dir": "../elsewhere"}}, "hydra.run.dir=../elsewhere"),
    "the folder of a sweep": ({"sweep": {"dir": "../elsewhere"}}, "hydra.sweep.dir=../elsewhere"),
}


@pytest.mark.parametrize("name", HYDRA)
def test_a_config_folder_cannot_change_what_hydra_does(name: str, tmp_path: Path) -> None:
    hydra, setting = HYDRA[name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "x", "hydra": hydra}))
    assert setting in [mistake.setting for mistake in check_config_folder(tmp_path, "config", [])]
    assert check_config_folder(tmp_path, "config", [f"hydra.searchpath=[{tmp_path}]"]) == []


@pytest.mark.parametrize("flags", [["-m", "seed=1,2"], ["--cfg", "all"], []], ids=len)
def test_hydra_is_not_started_with_such_a_folder(
    flags: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(run, {"hydra": {"callbacks": {"x": COMMAND}}})
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-path", str(run), *flags])
    assert train.main() == 2
    assert "hydra.callbacks.x._target_=os.system\n" in capsys.readouterr().err
    assert not Path("executed").exists()


def test_no_variable_is_shown_in_an_error_of_the_defaults_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t")
    (tmp_path / "config.yaml").write_text("defaults: [{optimizer: '${oc.env:SECRET}'}]\n")
    [mistake] = check_config_folder(tmp_path, "config", [])
    assert "s3cr3t" not in str(mistake)
    assert "${oc.env:SECRET}" in mistake.reason
