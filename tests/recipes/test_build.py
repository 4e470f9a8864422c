"""Mistakes that only the machine can reveal are reported before anything is built, in the same three clauses."""

from pathlib import Path

import pytest
import torch
from support import TINY, composed_config

from recipes.build import _make, _make_trainer, build
from recipes.errors import ConfigError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@needs_no_gpu
def test_a_requested_gpu_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(composed_config("trainer.accelerator=gpu"), tmp_path, [])
    assert caught.value.fix == "trainer.accelerator=auto"


def test_building_creates_no_weights_and_reads_no_data(tmp_path: Path) -> None:
    run = build(composed_config("model=llama_8b", "recipe=single_bf16"), tmp_path, [])
    assert list(run.task.parameters()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_larger_than_the_model_is_found_before_training(tmp_path: Path, text_folder: str) -> None:
    from recipes.mode.fit import fit

    tiny = [override for override in TINY if not override.startswith("tokenizer")]
    overrides = [*tiny, f"data.path={text_folder}", "tokenizer=huggingface", "tokenizer.name=x"]
    config = composed_config(*overrides)
    config["data"]["tokenizer"] = {"_target_": "recipes.tokenizer.bytes.Bytes"}
    config["data"]["vocab_size"] = 200
    with pytest.raises(ConfigError) as caught:
        fit(build(config, tmp_path, []))
    assert caught.value.fix == "model.vocab_size=257"


@pytest.mark.parametrize("partial", [False, True])
def test_text_that_looks_like_a_reference_reaches_a_constructor_as_it_is(partial: bool) -> None:
    arguments = {"a": "${HOME}", "l": ["${x}", {"y": "z${q}"}], "d": {"k": "\\${b}"}, "p": "\\x $ {a}"}
    made = _make({"_target_": "builtins.dict", "_partial_": partial} | arguments)
    assert (made() if partial else made) == arguments


def test_an_argument_that_lightning_rejects_is_a_mistake() -> None:
    node = {"_target_": "lightning.pytorch.Trainer", "max_steps": 3, "benchmark": True, "deterministic": "warn"}
    with pytest.raises(ConfigError, match=r"one of trainer\.max_steps, trainer\.benchmark"):
        _make_trainer(
            node, accelerator="cpu", logger=False, max_epochs="many", barebones=True, enable_progress_bar=True
        )
