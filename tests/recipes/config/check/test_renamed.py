"""An old name of a setting or an option is answered with the new one and the value typed, exit code 2."""

import re
import shutil
from pathlib import Path

import pytest
from support import ROOT

import train
from recipes.config import compose_and_check
from recipes.config.check.renamed import RENAMED, answer_renamed
from recipes.runtime.exit_codes import ExitCode
from recipes.sweep.command_line import check_command

CONF = ROOT / "conf"


@pytest.fixture(autouse=True)
def _renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rename what never had another name."""
    monkeypatch.setitem(RENAMED, "model.breadth", "model.hidden_size")
    monkeypatch.setitem(RENAMED, "optimizer=adamax", "optimizer=adamw")


def answers(*overrides: str) -> list[tuple[str, str, str]]:
    """Return the three clauses of each mistake."""
    _, mistakes = compose_and_check(overrides)
    return [(mistake.setting, mistake.reason, mistake.fix) for mistake in mistakes]


def test_an_old_setting_is_answered_with_the_new_one_and_its_value() -> None:
    reason = "`model.breadth` is now `model.hidden_size`"
    assert answers("model.breadth=96") == [("model.breadth=96", reason, "model.hidden_size=96")]
    assert answers("~model.breadth") == [("~model.breadth", reason, "'~model.hidden_size'")]
    for plus in ("+", "++"):  # Hydra itself accepts a key that is added
        [(_, found, fix)] = answers(f"{plus}model.breadth=96")
        assert (found, fix.lstrip("+")) == (reason, "model.hidden_size=96")


def test_an_old_option_is_answered_with_the_new_one() -> None:
    reason = "`optimizer=adamax` is now `optimizer=adamw`"
    assert answers("optimizer=adamax") == [("optimizer=adamax", reason, "optimizer=adamw")]


def test_all_values_of_a_sweep_are_carried_over() -> None:
    typed = ["optimizer=sgd,adamax", "model.breadth=48,96", "strategy=fsdp"]
    mistakes = check_command(typed, config_folder=CONF, config_name="config").mistakes
    assert [(mistake.setting, mistake.fix) for mistake in mistakes] == [
        ("model.breadth=48,96", "model.hidden_size=48,96"),
        ("optimizer=sgd,adamax", "optimizer=sgd,adamw"),
    ]
    assert [fix for *_, fix in answers("optimizer=sgd,adamax")] == ["optimizer=sgd,adamw"]  # without -m


def test_an_old_setting_in_a_yaml_file_is_named_with_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import recipes.config.check as located
    from recipes.config import search_path
    from recipes.config.check import command_line, sections

    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    for module in (command_line, located, search_path, sections):
        monkeypatch.setattr(module, "CONF", conf)
    text = (conf / "model/gpt2_nano.yaml").read_text()
    (conf / "model/mine.yaml").write_text(text + "breadth: 96\n")
    _, [mistake] = compose_and_check(["model=mine"], config_folder=conf)
    assert mistake.reason == "`model.breadth` is now `model.hidden_size`"
    assert mistake.fix == "model.hidden_size=96 (in conf/model/mine.yaml, line 10)"


@pytest.mark.parametrize("override", ["model.hidden_size=96", "optimizer=adamw", "seed=3", "foo", "~seed"])
def test_current_names_are_no_old_ones(override: str) -> None:
    assert answer_renamed(override) is None


def test_an_old_name_ends_with_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "model.breadth=96", "optimizer=adamax"])
    assert train.main() == ExitCode.INVALID_CONFIG
    assert re.findall("type: (.*)", capsys.readouterr().err) == ["optimizer=adamw", "model.hidden_size=96"]
