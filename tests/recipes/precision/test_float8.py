"""Float8 by torchao: which matrices it takes, what it leaves as it is, and what the config check rejects."""

import pytest
import torch
from torch import nn

from recipes.config import compose_and_check
from recipes.config import resolved as resolved_module
from recipes.config.check import devices
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.precision.float8 import Float8Precision, unwrap


def make_model(hidden_size: int = 32) -> GPT2:
    with torch.device("meta"):
        return GPT2(vocab_size=64, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=hidden_size, dropout=0.0)


def float8(*, emulate: bool = True) -> Float8Precision:
    return Float8Precision(name="fp8-mixed", scaling="tensorwise", emulate=emulate)


def test_all_matrices_of_blocks_and_no_other_compute_in_float8() -> None:
    model, plain = make_model(), make_model()
    float8().convert(model, shards_weights=False)
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    matrices = ("attention.qkv", "attention.out", "mlp.up", "mlp.out")
    assert converted == {f"blocks.{index}.{name}" for index in range(2) for name in matrices}
    assert model.state_dict().keys() == plain.state_dict().keys(), "a checkpoint fits either"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_matrices_whose_sides_the_units_cannot_take_stay() -> None:
    model = make_model(hidden_size=24)  # no multiple of 16; 3 x 24 and 4 x 24 are none or one
    float8().convert(model, shards_weights=False)
    assert not [module for module in model.modules() if type(module).__name__ == "Float8Linear"]


def test_a_model_without_blocks_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(32, 32, device="meta"))
    float8().convert(model, shards_weights=False)
    assert type(model[0]) is nn.Linear


def test_a_gpu_without_float8_units_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match="A100-SXM4-80GB has no float8 units; type precision=bf16-mixed"):
        float8(emulate=False).convert(make_model(), shards_weights=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    float8(emulate=False).convert(make_model(), shards_weights=False)


def test_a_shard_that_is_cast_when_gathered_is_saved_as_plain_float32() -> None:
    model = make_model()
    float8().convert(model, shards_weights=True)
    model.to_empty(device="cpu")
    weight = model.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    assert type(weight.detach()) is not torch.Tensor
    assert type(unwrap(weight.detach())) is torch.Tensor
    assert unwrap(weight.detach()).dtype == torch.float32
    plain = torch.zeros(2)
    assert unwrap(plain) is plain


def messages(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(["precision=fp8-mixed", *typed])[1]]


def test_without_a_gpu_bfloat16_and_emulation_are_named() -> None:
    assert messages() == [
        "precision=fp8-mixed: float8 matmuls need a GPU, and there is none;"
        " type precision=bf16-mixed, or precision.emulate=true to try the rounding"
    ]
    assert messages("precision.emulate=true") == []


def test_deepspeed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_module, "num_gpus", lambda: 1)
    assert messages("strategy=deepspeed_stage_2", "compile=false") == [
        "precision=fp8-mixed strategy=deepspeed_stage_2: DeepSpeed computes with weights of its own, which torchao does"
        " not cast; type strategy=fsdp, or precision=bf16-mixed"
    ]


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = devices.importlib.util.find_spec
    monkeypatch.setattr(
        devices.importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name)
    )
    assert messages("precision.emulate=true") == [
        "precision=fp8-mixed: torchao is not installed; type pip install -e '.[fp8]'"
    ]
