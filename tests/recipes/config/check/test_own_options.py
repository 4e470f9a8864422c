"""Options of one's own folders: each mistake is one sentence, and what is not one is read as it is written."""

from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.config.check.own_options import check_own_options
from recipes.config.compose import CONF, quote_options
from recipes.config.resolved import ResolvedRun

PATH = "hydra.searchpath=[own]"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of one's own options, beside which commands are typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "own"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def check(choices: dict[str, str], *typed: str, config: dict[str, object] | None = None) -> list[str]:
    overrides = [PATH, *typed]
    run = ResolvedRun(config=config or {}, choices=choices, run_folder=Path(), overrides=overrides, typed=overrides)
    return [str(mistake) for mistake in check_own_options(run, overrides)]


@pytest.mark.parametrize(
    ("name", "typed", "choice"),
    [
        ("optimizer/adamw", "optimizer=adamw", "optimizer=<new name>"),
        ("recipe/quickstart", "seed=3", "recipe=<new name>"),
        ("callbacks/early_stop", "callbacks=[default,hang]", "callbacks=[default,hang,<new name>]"),
    ],
)
def test_an_own_option_with_the_name_of_one_of_conf_is_answered(own: Path, name: str, typed: str, choice: str) -> None:
    file = write(own / f"{name}.yaml", "lr: 1\n")
    [mistake] = check({"optimizer": "adamw", "recipe": "quickstart"}, typed)
    assert f"conf/ has an option {file.stem!r} too, which is read instead of {file}; type mv {file} " in mistake
    assert mistake.endswith(f"/<new name>.yaml, and then {choice}")
    assert check({"optimizer": "lion", "recipe": "sft", "callbacks": "hang"}) == []  # none of them is chosen
    write(file, (CONF / f"{name}.yaml").read_text())  # a copy is no surprise
    assert check({"optimizer": "adamw", "recipe": "quickstart"}, typed) == []


def test_a_group_that_nothing_reads_is_answered(own: Path) -> None:
    file = write(own / "mine/x.yaml", "a: 1\n")
    assert check({"mine": "x"}, "+mine=x", config={"mine": {"a": 1}}) == [
        f"+mine=x: nothing reads a section 'mine', which is where {file} puts its settings;"
        " type the same command without +mine=x"
    ]
    assert check({"mine": "x"}, "+mine=x", config={"seed": 1}) == []  # of another package


def test_a_callback_without_a_section_of_its_own_is_one_mistake(own: Path) -> None:
    write(own / "callbacks/mine.yaml", "_target_: callbacks.memory.MemoryMonitor\n")
    [mistake] = compose_and_check([PATH, "callbacks=[default,mine]"])[1]
    assert mistake.setting == "callbacks._target_=callbacks.memory.MemoryMonitor"


def test_a_byte_order_mark_hides_no_package_and_the_path_may_begin_with_the_home_folder(own: Path) -> None:
    write(own / "recipe/mine.yaml", "\ufeff# @package _global_\nseed: 7\n")
    run, mistakes = compose_and_check(["hydra.searchpath=[~/own]", "recipe=mine"])
    assert mistakes == []
    assert run is not None
    assert run.config["seed"] == 7
    [expanded] = quote_options(["hydra.searchpath=[file://~/own,pkg://mine]"])
    assert expanded == f"hydra.searchpath=[file://{own},pkg://mine]"


def test_an_own_option_that_refers_to_no_setting_is_one_sentence_that_names_it(own: Path) -> None:
    write(own / "loss/mine.yaml", "_target_: recipes.loss.cross_entropy.CrossEntropy\nz_loss: ${nope.weight}\n")
    assert [str(mistake) for mistake in compose_and_check([PATH, "loss=mine"])[1]] == [
        "loss=mine loss.z_loss=…: there is no setting 'nope.weight'; type loss.z_loss=<value> on the command line"
    ]
