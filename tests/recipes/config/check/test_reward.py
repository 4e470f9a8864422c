"""Rewards on the command line: who reads them, that a file of the user's is there, and who may name one."""

import json
from pathlib import Path

import pytest
import yaml
from support import composed_config
from typed_remedies import find_refused

from recipes.config import compose_and_check
from recipes.config.check.origin import check_origin


def check(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(typed)[1]]


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text("def brevity(completions, **given):\n    return [0.0 for _ in completions]\n")
    return f"{tmp_path}/mine.py:brevity"


def test_several_rewards_reach_the_answers_of_training_and_evaluation(function: str) -> None:
    typed = ["reward=[exact_match,mine]", f"reward.mine.path={function}", "reward.mine.weight=0.5"]
    config = composed_config("recipe=sft_demo", *typed)
    assert config["callbacks"]["generation_eval"]["rewards"]["functions"] == config["reward"]
    assert {name: node["weight"] for name, node in config["reward"].items()} == {"exact_match": 1.0, "mine": 0.5}


def test_rewards_may_select_the_best_checkpoint() -> None:
    typed = ["recipe=sft_demo", "reward=exact_match", "checkpoint.mode=max", "checkpoint.keep_best=1"]
    for metric in ("val/reward", "val/reward/exact_match", "val/exact_match"):
        assert check(*typed, f"checkpoint.monitor={metric}") == []
    assert check("recipe=sft_demo", "checkpoint.keep_best=1", "checkpoint.monitor=val/reward") != []


MISTAKES = {
    "reward=exact_match": "reward=exact_match: nothing generates answers that it could score;"
    " type callbacks=[default,generation_eval] reward=exact_match",
    "recipe=sft_demo reward.exact_match.weight=2": "reward.exact_match.weight=2: there is no"
    " 'reward.exact_match.weight'; type reward=exact_match reward.exact_match.weight=2",
    "recipe=sft_demo reward=exact_match reward.length.weight=2": "reward.length.weight=2: there is no"
    " 'reward.length.weight'; type reward=[exact_match,length] reward.length.weight=2",
    "recipe=sft_demo reward=model": "no reward.model.pretrained: it has no default; type"
    " reward.model.pretrained=<exported reward model, or its run>",
    "recipe=sft_demo reward=model reward.model.pretrained=/no": "reward.model.pretrained=/no: there is no such folder;"
    " type reward.model.pretrained=<folder with config.json, or hub id>",
    "recipe=sft_demo reward=model reward.model.pretrained=RUN": "reward.model.pretrained=RUN: it is a run whose model"
    " is not exported yet; type mode=export resume=RUN and then this command again",
    "recipe=sft_demo reward=model reward.model.pretrained=ENCODER": "reward.model.pretrained=ENCODER: it holds a"
    " BertModel, which has no score; type reward.model.pretrained=<exported reward model, or its run>",
    "recipe=sft_demo seq_len=64 reward=model reward.model.pretrained=SHORT": "seq_len=64"
    " reward.model.pretrained=SHORT: a prompt with its completion may have as many tokens, and the reward model reads"
    " 32; type seq_len=32",
    "recipe=sft_demo reward=mine": "no reward.mine.path: it has no default; type reward.mine.path=<file.py>:<function>",
    "recipe=sft_demo reward=mine reward.mine.path=FILE:brief": "reward.mine.path=FILE:brief: FILE has no function"
    " 'brief'; type reward.mine.path=FILE:brevity",
    "recipe=sft_demo reward=mine reward.mine.path=FILE": "reward.mine.path=FILE: it names no function in"
    " that file; type reward.mine.path=FILE:brevity",
    "recipe=sft_demo reward=mine reward.mine.path=no.py:f": "reward.mine.path=no.py:f: there is no file no.py;"
    " type reward.mine.path=<file.py>:f",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes(typed: str, function: str, tmp_path: Path) -> None:
    names = {"FILE": function.rpartition(":")[0]} | {name: f"{tmp_path}/{name}" for name in ("RUN", "ENCODER", "SHORT")}
    for name, kind in (("ENCODER", "BertModel"), ("SHORT", "GPT2ForSequenceClassification")):
        (tmp_path / name).mkdir()
        config = {"model_type": "gpt2", "architectures": [kind], "n_positions": 32}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN/config.yaml").write_text("")

    def fill(text: str) -> str:
        for name, place in names.items():
            text = text.replace(name, place)
        return text

    _, mistakes = compose_and_check(fill(typed).split())
    assert [str(mistake) for mistake in mistakes] == [fill(MISTAKES[typed])]
    assert find_refused(fill(typed).split(), mistakes) == []


def test_code_that_is_not_python_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(:\n")
    [mistake] = check("recipe=sft_demo", "reward=mine", f"reward.mine.path={tmp_path}/mine.py:f")
    assert "is no Python code" in mistake


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("completions", "does not take all of them"),
        ("completions, answer, **others", "asks for answer, too"),
        ("prompts, completions, references, rows, *, scale", "asks for scale, too"),
        ("prompts, completions, references, rows, scale=1.0", None),
        ("*, completions, rows, **others", None),
    ],
)
def test_a_function_takes_what_it_is_called_with_by_name(tmp_path: Path, arguments: str, reason: str | None) -> None:
    (tmp_path / "mine.py").write_text(f"def f({arguments}):\n    return [0.0 for _ in completions]\n")
    mistakes = check("recipe=sft_demo", "reward=mine", f"reward.mine.path={tmp_path}/mine.py:f")
    assert [reason in mistake for mistake in mistakes if reason] == ([True] if reason else [])
    assert bool(mistakes) == (reason is not None)


def test_only_the_command_line_names_a_file_that_is_executed(function: str, tmp_path: Path) -> None:
    typed = ["reward=mine", f"reward.mine.path={function}"]
    config = composed_config("recipe=sft_demo", *typed)
    where = tmp_path / "config.yaml"
    [mistake] = check_origin(config, (), where)
    assert str(mistake) == (
        f"reward.mine.path={function}: {where} sets it, and a folder may not choose the code that runs;"
        f" type ++reward.mine.path={function} if you trust it"
    )
    assert [*check_origin(config, typed[1:], where)] == []
    for place in ("reward", "callbacks.generation_eval.rewards.functions"):
        forged = yaml.safe_load(yaml.safe_dump(config))
        node = forged
        for key in place.split("."):
            node = node[key]
        node["mine"]["path"] = "forged.py:f"
        assert any("forged.py:f" in str(mistake) for mistake in check_origin(forged, typed, where)), place
