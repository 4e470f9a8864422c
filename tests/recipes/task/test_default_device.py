"""A model is built the same way whatever device Lightning has made the default one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from support import TINY, composed_config, resolved

from recipes.build import build
from recipes.numerics.nf4 import dequantize, is_nf4

VARIANTS = {
    "whole model": ["strategy=single"],
    "ZeRO-2": ["strategy=deepspeed_stage_2"],
    "LoRA": ["strategy=single", "adapter=lora"],
    "DoRA": ["strategy=ddp", "adapter=dora"],
    "NF4": ["strategy=single", "adapter=qlora"],
}


@contextmanager
def another_default_device(self: Strategy, empty_init: bool | None = None) -> Iterator[None]:
    """Act as Lightning does where the device is a GPU: a meta tensor cannot be copied to a model."""
    with torch.device("meta"):
        yield


def built_state(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    run = build(resolved(composed_config(*TINY, *overrides, "trainer.max_steps=1", "save_every=null"), folder))
    run.trainer.fit(run.task, datamodule=run.data)
    state = run.task.model.state_dict()
    return {name: dequantize(values) if is_nf4(values) else values for name, values in state.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_names_no_device_is_on_the_host(
    name: str, tmp_path: Path, text_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = [f"data.path={text_folder}", "model=llama_nano", *VARIANTS[name]]
    expected = built_state(tmp_path / "host", *typed)
    monkeypatch.setattr(Strategy, "tensor_init_context", another_default_device)
    found = built_state(tmp_path / "other", *typed)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], values), key
