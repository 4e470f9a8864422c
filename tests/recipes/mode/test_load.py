"""Weights that a checkpoint will overwrite are not drawn first: on every rank that takes minutes for a large model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import TINY, composed_config, resolved

from recipes.build import Run, build
from recipes.errors import ConfigError
from recipes.mode.load import load_task
from recipes.model import init


def start(folder: Path, text_folder: str, *overrides: str) -> Run:
    config = composed_config(
        *TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", "trainer.max_steps=2", "save_every=1", *overrides
    )
    return build(resolved(config, folder))


def test_a_model_that_a_checkpoint_fills_draws_no_weights_of_its_own(
    tmp_path: Path, text_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path / "first", text_folder)
    run.trainer.fit(run.task, datamodule=run.data)
    saved = {name: tensor.clone() for name, tensor in run.task.state_dict().items()}

    def draw(*args: object, **kwargs: object) -> None:
        raise AssertionError("first weights are drawn")

    monkeypatch.setattr(init, "normal_", draw)
    resume = f"resume={tmp_path / 'first'}"
    task, _ = load_task(start(tmp_path / "second", text_folder, resume, "mode=evaluate"), "trained")
    loaded = task.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())

    longer = start(tmp_path / "third", text_folder, resume, "trainer.max_steps=3")
    longer.trainer.fit(longer.task, datamodule=longer.data, ckpt_path=longer.checkpoint, weights_only=True)
    assert longer.trainer.global_step == 3
    assert all(tensor.isfinite().all() for tensor in longer.task.state_dict().values())

    without = start(tmp_path / "fourth", text_folder, resume, "trainer.max_steps=3")
    with pytest.raises(AssertionError, match="none was loaded"):
        without.trainer.fit(without.task, datamodule=without.data)


@pytest.mark.parametrize(("saved", "resumed"), [("32-true", "bf16-true"), ("bf16-true", "32-true")])
def test_a_run_resumed_in_another_precision_goes_on_from_the_same_weights(
    saved: str, resumed: str, tmp_path: Path, text_folder: str
) -> None:
    run = start(tmp_path / "first", text_folder, f"precision={saved}")
    run.trainer.fit(run.task, datamodule=run.data)
    before = {name: tensor.float().clone() for name, tensor in run.task.state_dict().items()}

    longer = start(
        tmp_path / "second", text_folder, f"precision={resumed}", f"resume={tmp_path / 'first'}",
        "trainer.max_steps=3", "optimizer.lr=1e-6",
    )  # fmt: skip
    longer.trainer.fit(longer.task, datamodule=longer.data, ckpt_path=longer.checkpoint, weights_only=True)
    assert longer.trainer.global_step == 3
    [optimizer] = longer.trainer.optimizers
    wanted = torch.bfloat16 if resumed == "bf16-true" else torch.float32
    for name, parameter in longer.task.named_parameters():
        assert parameter.dtype == wanted
        assert optimizer.state[parameter]["exp_avg"].dtype == wanted
        assert float(optimizer.state[parameter]["step"]) == 3
        # bfloat16 rounds by 2^-8 of a weight; a step of AdamW moves one by about the learning rate, 1e-6
        assert torch.allclose(parameter.float(), before[name], rtol=2**-8, atol=1e-5), name


def test_an_adapter_goes_on_beside_the_weights_and_the_config_it_was_trained_beside(tmp_path: Path) -> None:
    published, moved, other = tmp_path / "published", tmp_path / "moved", tmp_path / "other"
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **size)).save_pretrained(published)
    shutil.copytree(published, moved)
    shutil.copytree(published, other)

    def begin(name: str, folder: Path, *overrides: str) -> Run:
        typed = ["model=huggingface", f"model.name={folder}", "model.max_seq_len=32", "adapter=lora", "tokenizer=none"]
        typed += ["data=random_tokens", "global_batch_size=2", "eval_samples=2", "trainer.max_steps=1", "save_every=1"]
        config = composed_config(*typed, "eval_every=1", "warmup_steps=0", "trainer.accelerator=cpu", *overrides)
        return build(resolved(config, tmp_path / name))

    run = begin("run", published)
    run.trainer.fit(run.task, datamodule=run.data)
    resume = f"resume={tmp_path / 'run'}"
    load_task(begin("again", moved, resume, "mode=evaluate"), "trained")

    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    refused = f"the weights of {other}: they have other values than .* {published}"
    with pytest.raises(ConfigError, match=refused):
        load_task(begin("evaluate", other, resume, "mode=evaluate"), "trained")

    shutil.copytree(published, tmp_path / "config")  # elsewhere: a config is read once a process
    config = json.loads((published / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    changed = begin("evaluate", tmp_path / "config", resume, "mode=evaluate")
    with pytest.raises(ConfigError, match=r"it has rms_norm_eps=0\.1, and the weights were trained with .*=1e-06"):
        load_task(changed, "trained")
