"""Every renamed setting and option is answered with its new name and the value typed, exit code 2."""

import re
import shutil
from pathlib import Path

import pytest
from support import ROOT, composed_config

import train
from recipes.config import compose_and_check
from recipes.config.check import check_config
from recipes.config.check.renamed import (
    RENAMED_OPTIONS,
    RENAMED_SETTINGS,
    answer_renamed_option,
    answer_renamed_setting,
    check_renamed,
)
from recipes.config.signature import read_signature
from recipes.runtime.exit_codes import ExitCode
from recipes.sweep.command_line import check_command

CONF = ROOT / "conf"
OPTIONS = [(group, old, new) for group, renamed in RENAMED_OPTIONS.items() for old, new in renamed.items()]
# options without which a section has no such setting
CONTEXT = {
    "strategy.gradient_sync": ["strategy=fsdp"],
    "clipping.warmup_steps": ["clipping=zclip"],
    "model.ffn_hidden_size": ["model=llama_nano"],
    "model.tie_embeddings": ["model=llama_nano"],
}
# old key -> a value that was valid, and what it is called now
VALUES = {"strategy.reduce_every": ("window", "per_step")}


def value_of(old: str) -> tuple[str, str]:
    return VALUES.get(old, ("5", "5"))


def answers(*overrides: str) -> list[tuple[str, str, str]]:
    """Return the three clauses of each mistake."""
    _, mistakes = compose_and_check(overrides)
    return [(mistake.setting, mistake.reason, mistake.fix) for mistake in mistakes]


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_an_old_setting_is_answered_with_the_new_one_and_its_value(old: str, new: str) -> None:
    before, now = value_of(old)
    reason = f"`{old}` is now `{new}`"
    context = CONTEXT.get(new, [])
    expected = [(f"{old}={before}", reason, f"{new}={now}")]
    assert answers(*context, f"{old}={before}") == expected
    # Hydra itself accepts a key that is added
    for plus in ("+", "++"):
        assert answers(*context, f"{plus}{old}={before}") == expected
    assert answers(*context, f"~{old}") == [(f"~{old}", reason, f"'~{new}'")]


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_the_new_name_of_a_setting_exists_and_the_old_one_does_not(old: str, new: str) -> None:
    config = composed_config(*CONTEXT.get(new, []))
    *sections, key = new.split(".")
    node = config
    for section in sections:
        node = node[section]
    target = node.get("_target_")
    accepted = read_signature(target).parameters if target else node
    if new not in NOT_YET:
        assert key in accepted
    assert old.rpartition(".")[2] not in accepted


# announced names of arguments that are still to come
NOT_YET = {"model.vocab_pad_multiple", "callbacks.loss_spike.rewind_data"}


@pytest.mark.parametrize(("group", "old", "new"), OPTIONS)
def test_an_old_option_is_answered_with_the_new_one(group: str, old: str, new: str) -> None:
    fix = f"{group}={new}"
    reason = f"`{group}={old}` is now `{fix}`"
    assert answers(f"{group}={old}") == [(f"{group}={old}", reason, fix)]
    assert (CONF / group / f"{new}.yaml").is_file()
    assert not (CONF / group / f"{old}.yaml").is_file()


def test_all_values_of_a_sweep_are_carried_over() -> None:
    typed = ["optimizer=sgd,adamw_small", "callbacks.early_stop.after=3,5", "strategy=fsdp"]
    typed += ["strategy.reduce_every=window,micro_batch"]
    mistakes = check_command(typed, config_folder=CONF, config_name="config").mistakes
    assert [(mistake.setting, mistake.fix) for mistake in mistakes] == [
        ("callbacks.early_stop.after=3,5", "callbacks.early_stop.patience=3,5"),
        (
            "strategy.reduce_every=window,micro_batch",
            "strategy.gradient_sync=per_step,per_micro_batch",
        ),
        ("optimizer=sgd,adamw_small", "optimizer=sgd,adamw_nano"),
    ]
    mistakes = check_command(["optimizer=adamw_small,sgd"], config_folder=CONF, config_name="config").mistakes
    assert [mistake.fix for mistake in mistakes] == ["optimizer=adamw_nano,sgd"]


def test_a_sweep_typed_without_m_is_answered_with_all_its_values_too() -> None:
    assert [fix for *_, fix in answers("callbacks.early_stop.after=3,5")] == ["callbacks.early_stop.patience=3,5"]
    assert [fix for *_, fix in answers("optimizer=sgd,adamw_small")] == ["optimizer=sgd,adamw_nano"]


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ to add a file of one's own to."""
    import recipes.config.check as located
    from recipes.config import search_path
    from recipes.config.check import command_line, sections

    copy = tmp_path / "conf"
    shutil.copytree(CONF, copy)
    for module in (command_line, located, search_path, sections):
        monkeypatch.setattr(module, "CONF", copy)
    return copy


def test_an_old_setting_in_a_yaml_file_is_named_with_its_file_and_line(conf: Path) -> None:
    text = (conf / "model/gpt2_nano.yaml").read_text()
    (conf / "model/mine.yaml").write_text(text.replace("hidden_size:", "width:"))
    _, mistakes = compose_and_check(["model=mine"], config_folder=conf)
    assert [(mistake.setting, mistake.reason, mistake.fix) for mistake in mistakes] == [
        (
            "model.width=192",
            "`model.width` is now `model.hidden_size`",
            "model.hidden_size=192 (in conf/model/mine.yaml, line 8)",
        )
    ]


def test_an_old_option_in_a_recipe_of_ones_own_is_named(conf: Path) -> None:
    (conf / "recipe/mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /optimizer: adamw_small\n")
    _, [mistake] = compose_and_check(["recipe=mine"], config_folder=conf)
    assert "`optimizer=adamw_small` is now `optimizer=adamw_nano`" in mistake.reason
    assert mistake.fix == "optimizer: adamw_nano in that file"


def test_a_model_of_ones_own_may_have_an_argument_of_an_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "models_with_width"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class Net:\n    input_kind = 'tokens'\n    def __init__(self, width: int) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = composed_config()
    config["model"] = {"_target_": "models_with_width.Net", "width": 64}
    assert list(check_renamed(config)) == []
    assert check_config(config, {}, [], tmp_path) == []


@pytest.mark.parametrize("override", ["callbacks.early_stop.patience=5", "seed=3", "foo", "~seed"])
def test_current_names_are_no_old_ones(override: str) -> None:
    assert answer_renamed_setting(override) is None
    assert answer_renamed_option(override) is None


def test_an_old_name_ends_with_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "callbacks.early_stop.after=5", "checkpoint=folders"])
    assert train.main() == ExitCode.INVALID_CONFIG
    printed = capsys.readouterr().err
    assert re.findall("type: (.*)", printed) == [
        "checkpoint=default",
        "callbacks.early_stop.patience=5",
    ]
