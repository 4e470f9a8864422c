"""A resumed run has the model and the token ids that its weights were trained with."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import resolved

from recipes.config.check.resumed import check_resumed
from recipes.config.compose import compose_run

CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    # none of these changes a single shape of GPT-2, so the weights would load
    "heads": ({"model.num_heads": 3}, "its weights were trained with model.num_heads=6"),
    "tokenizer": (
        {"tokenizer": {"_target_": "recipes.tokenizer.bytes.Bytes"}},
        "its weights were trained with the token ids of Bpe(vocab_size=2048), not of Bytes",
    ),
    "ids": (
        {"tokenizer.vocab_size": 300},
        "its weights were trained with the token ids of Bpe(vocab_size=2048), not of Bpe(vocab_size=300)",
    ),
    "layers": ({"model.num_layers": 12}, "its weights were trained with model.num_layers=3"),
    "model": ({"model._target_": "recipes.model.llama.Llama"}, "its weights are those of GPT2"),
    "adapter": ({"adapter": {"_target_": "recipes.adapter.lora.Lora"}}, "its weights were trained without an adapter"),
    "published": ({"model.pretrained": "gpt2"}, "its weights are those of the checkpoint, and no others would be read"),
}


EVALUATE = {"_target_": "recipes.mode.evaluate.evaluate"}


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose_run([]).config


@pytest.mark.parametrize("resume", ["auto", "folder", "checkpoint"])
def test_another_model_or_tokenizer_is_rejected(resume: str, config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_0000003.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    named = {"auto": "auto", "folder": str(tmp_path), "checkpoint": str(checkpoint)}[resume]
    resumed = config | {"resume": named}
    assert not list(check_resumed(resolved(resumed, tmp_path)))
    for changes, reason in CHANGED.values():
        other = copy.deepcopy(resumed)
        for key, value in changes.items():
            section, _, name = key.partition(".")
            other[section] = other[section] | {name: value} if name else value
        typed = [f"{key}=" for key in (*changes, *(f"{key}._target_" for key in ("model", "adapter", "tokenizer")))]
        [mistake] = check_resumed(replace(resolved(other, tmp_path), typed=typed))
        assert mistake.reason == reason
        assert mistake.setting.startswith(f"resume={named} ")
        assert ", or resume=null to " in mistake.fix
        [mistake] = check_resumed(replace(resolved(other | {"mode": EVALUATE}, tmp_path), typed=typed))
        assert re.fullmatch("the same command without [a-z_.]+=?", mistake.fix), "nothing is trained"
    # what leaves the meaning of the weights as it is
    regularized = resumed | {"model": config["model"] | {"dropout": 0.1}, "tokenizer": {}}
    assert not list(check_resumed(resolved(regularized, tmp_path)))


def test_every_setting_is_of_the_weights_but_those_of_training_and_those_a_model_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    free_at_resume = ('scale',)\n"
        "    def __init__(self, *, fraction, scale, dropout=0.0, norm='rms', pretrained=None): ...\n"
    )
    (tmp_path / "checkpoints/step_0000003.ckpt").mkdir(parents=True)
    (tmp_path / "checkpoints/step_0000003.ckpt/manifest.json").write_text("{}")
    began = compose_run(["model=llama_nano"]).config
    mine = began | {"model": {"_target_": "mine.Mine", "fraction": 0.25, "scale": 1.0}}

    def rejected(config: dict[str, Any], typed: list[str], **changes: Any) -> list[str]:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        other = config | {"resume": str(tmp_path), "model": config["model"] | changes}
        return [each.setting.split()[1] for each in check_resumed(replace(resolved(other, tmp_path), typed=typed))]

    assert rejected(mine, [], fraction=0.5) == ["model.fraction=0.5"]
    assert rejected(mine, [], norm="layer") == ["model.norm=layer"]
    assert rejected(mine, [], norm="rms", dropout=0.5) == []  # the default, and what is used in training only
    assert rejected(mine, [], scale=2.0) == ["model.scale=2.0"]
    assert rejected(mine, ["model.scale=2"], scale=2.0) == []
    assert rejected(began, [], rope_theta=5e5, rms_eps=1e-6) == ["model.rope_theta=500000.0", "model.rms_eps=1e-06"]
    assert rejected(began, ["model.rope_theta=5e5"], rope_theta=5e5, max_seq_len=512) == []


def test_settings_that_resume_auto_does_not_take_from_the_run_are_one_mistake(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints/step_0000003.ckpt").mkdir(parents=True)
    (tmp_path / "checkpoints/step_0000003.ckpt/manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    model = config["model"] | {"num_heads": 2, "num_layers": 2, "hidden_size": 16}
    run = resolved(config | {"resume": "auto", "model": model}, tmp_path)
    [mistake] = check_resumed(run)
    assert mistake.reason.endswith("model.num_layers=3, and 2 more of its settings are not typed")
    assert mistake.fix.startswith(f"resume={tmp_path}, ")
    of_others, typed = check_resumed(replace(run, typed=["model.num_layers=2"]))
    assert of_others.reason.endswith(", and 1 more of its settings is not typed")
    assert typed.fix.startswith("the same command without model.num_layers, ")


LORA = {"_target_": "recipes.adapter.lora.Lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "pretrained": None}


@pytest.mark.parametrize(
    ("adapter", "setting", "reason"),
    [
        # the scale of its weights changes, and no shape
        (LORA | {"lora_alpha": 64}, "adapter.lora_alpha=64", "its weights were trained with adapter.lora_alpha=32"),
        (LORA | {"r": 4}, "adapter.r=4", "its weights were trained with adapter.r=16"),
        ({"_target_": "recipes.adapter.NoAdapter"}, "adapter=none", "its weights are those of Lora"),
        ({"_target_": "recipes.adapter.ia3.IA3"}, "adapter=ia3", "its weights are those of Lora"),
        (LORA | {"dropout": 0.1, "pretrained": "x"}, None, None),
    ],
)
def test_another_adapter_is_rejected(
    adapter: dict[str, Any], setting: str | None, reason: str | None, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"adapter": LORA}))
    resumed = config | {"resume": str(tmp_path), "adapter": adapter}
    # the base weights of an adapter may have moved
    resumed["model"] = config["model"] | {"pretrained": "moved"}
    choices = {"adapter": str(setting).partition("=")[2]}
    found = [(m.setting, m.reason) for m in check_resumed(replace(resolved(resumed, tmp_path), choices=choices))]
    assert found == ([] if setting is None else [(f"resume={tmp_path} {setting}", reason)])


def test_a_published_model_and_its_tokenizer_may_have_moved(config: dict[str, Any], tmp_path: Path) -> None:
    of_model = {"_target_": "recipes.tokenizer.huggingface.HuggingFace", "name": "/old"}
    model = {"_target_": "recipes.model.huggingface.HuggingFace", "name": "/old", "pretrained": "/old"}
    run, same, other = (tmp_path / name for name in ("run", "same", "other"))
    for folder, text in ((run / "tokenizer", '{"vocab": [1]}'), (same, '{"vocab":[1]}'), (other, '{"vocab": [2]}')):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(text)
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"model": model, "tokenizer": of_model}))
    moved = model | {"name": "/new", "pretrained": "/new"}
    resumed = config | {"resume": str(run), "model": moved, "tokenizer": of_model | {"name": "/new"}}
    references = {"model.pretrained": "model.name", "tokenizer.name": "model.name"}
    assert not list(check_resumed(replace(resolved(resumed, run), references=references)))
    assert len(list(check_resumed(resolved(resumed, run)))) == 2, "typed"
    for folder, num_mistakes in ((same, 0), (other, 1), (tmp_path / "none", 1)):
        typed = resumed | {"model": model, "tokenizer": of_model | {"name": str(folder)}}
        found = list(check_resumed(resolved(typed, run)))
        assert len(found) == num_mistakes
        assert all(m.setting == f"resume={run} tokenizer.name={folder}" for m in found)


def test_a_folder_without_a_checkpoint_has_no_weights_to_compare_with(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {_target_: x.Other}\n")
    assert not list(check_resumed(resolved(config | {"resume": "auto"}, tmp_path)))
    assert not list(check_resumed(resolved(config, tmp_path)))


def test_a_run_whose_config_holds_a_text_for_its_tokenizer_is_not_compared(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"tokenizer": "bytes"}))
    assert not list(check_resumed(resolved(config | {"resume": str(tmp_path)}, tmp_path)))
