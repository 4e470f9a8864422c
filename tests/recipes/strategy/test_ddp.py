"""DDP on a GPU: the model is wrapped on the stream that trains."""

from typing import Any

import pytest
import torch
from fake_cuda import fake_streams
from torch import nn

from recipes.precision import Precision
from recipes.strategy import ddp

GPU = torch.device("cuda", 0)


def test_the_model_is_wrapped_without_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are accumulated on the stream in which their nodes were made: another one costs a wait each."""
    wrapped: dict[str, Any] = {}
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda **arguments: wrapped.update(arguments))
    strategy = ddp.DDP(devices=[GPU], precision=Precision(name="bf16-mixed"))
    monkeypatch.setattr(ddp.DDP, "root_device", GPU)
    model = nn.Linear(2, 2)
    with fake_streams() as streams:
        strategy._setup_model(model)
    assert wrapped == {
        "module": model,
        "device_ids": [0],
        "gradient_as_bucket_view": True,
        "broadcast_buffers": False,
    }
    assert streams == []
