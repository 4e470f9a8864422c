"""FSDP with `cpu_offload` on a GPU: what belongs to weights in host memory is there too, and is not read too early.

Fake tensors on a fake CUDA mesh have devices without having values.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import GPU, FakeGpus, fake_gpus
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.checkpoint.shards import load_optimizer
from recipes.numerics.ema import NAME, average_weights
from recipes.parallel import placement
from recipes.strategy import skip_step
from recipes.strategy.precision_plugin import CountingScaler
from recipes.strategy.torch_native import clip_gradients

HOST = torch.device("cpu")


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    with fake_gpus() as gpus:
        yield gpus


def flag_on_gpu(parameters: list[nn.Parameter]) -> Tensor:
    """Return a guard's verdict, which lies where the norm of the gradients does."""
    norm, _ = clip_gradients(parameters, max_norm=1.0, max_value=None)
    assert norm.device == GPU, "summed by NCCL, or this test shows nothing"
    return norm > 1e9


def test_a_skipped_step_reads_its_flag_once_it_has_arrived(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [gpus.offloaded_parameter(64, 8), gpus.offloaded_parameter(128, 8)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()  # creates its state
    flag = flag_on_gpu(parameters)
    monkeypatch.setattr(Tensor, "__bool__", lambda self: True)  # a fake tensor has no value
    skip_step(optimizer, parameters, flag)
    assert all(parameter.grad is None for parameter in parameters)
    optimizer.step()
    assert gpus.unawaited == []


def test_a_flag_of_an_earlier_step_skips_no_later_one() -> None:
    """A rollback to before the first step leaves an optimizer without state, which cannot be skipped on the device."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    skip_step(optimizer, [weight], torch.tensor(False))
    optimizer.step()
    assert weight.tolist() != [1.0, 1.0, 1.0]


def test_weights_in_host_memory_are_averaged_where_they_are(gpus: FakeGpus) -> None:
    parameters = [gpus.offloaded_parameter(64, 8)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    average_weights(optimizer, decay=0.9, step=lambda: 5)
    optimizer.step()
    # a flag on the GPU, from whatever skips steps: the average of host tensors takes no weight from there
    optimizer.found_inf = torch.zeros((), device=GPU)  # type: ignore[attr-defined]
    [average] = optimizer._optimizer_step_post_hooks.values()
    average(optimizer, (), {})
    assert optimizer.state[parameters[0]][NAME].to_local().device == HOST
    assert gpus.unawaited == []


def test_float16_gradients_in_host_memory_are_unscaled_by_a_factor_that_has_arrived(gpus: FakeGpus) -> None:
    optimizer = torch.optim.AdamW([gpus.offloaded_parameter(64, 8)])
    scaler = CountingScaler("cpu")  # on a GPU it keeps its scale there, as below
    used: dict[str, torch.device] = {}

    def unscale(grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
        used.update(found_inf=found_inf.device, inv_scale=inv_scale.device)

    with mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        flags = scaler._unscale_grads_(
            optimizer, torch.ones((), device=GPU), torch.zeros((), device=GPU), allow_fp16=False
        )
    assert used == {"found_inf": HOST, "inv_scale": HOST}
    assert list(flags) == [HOST]
    assert gpus.unawaited == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_is_loaded_to_where_its_parameter_is(gpus: FakeGpus, dtype: torch.dtype) -> None:
    """8 bytes a parameter that did not fit on the GPU when training, and do not when resuming."""
    parameter = gpus.offloaded_parameter(64, 8, dtype=dtype)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    on_gpu = []
    copy = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = copy(self, *args, **kwargs)
        if result.device.type == "cuda":
            on_gpu.append(tuple(result.shape))
        return result

    saved = {name: SavedTensor(name=name, shape=torch.Size([64, 8]), dtype="F32") for name in ("exp_avg", "exp_avg_sq")}
    saved["step"] = SavedTensor(name="step", shape=torch.Size([]), dtype="F32")
    groups = [{"params": [0]}]

    def read(self: SavedTensor, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start)

    def read_box(self: SavedTensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape)

    def locate(*args: Any) -> Any:
        with unset_fake_temporarily():  # it computes with tensors
            return compute_local_shape_and_global_offset(*args)

    with (
        mock.patch.object(Tensor, "to", to),
        mock.patch.object(SavedTensor, "read_range", read),
        mock.patch.object(SavedTensor, "read_box", read_box),
        mock.patch.object(placement, "compute_local_shape_and_global_offset", locate),
    ):
        load_optimizer(optimizer, {"state": {0: saved}, "param_groups": groups}, {})
    assert on_gpu == []
    state = optimizer.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].shape == (64, 8)
        assert state[name].to_local().shape == (8, 8)
        assert state[name].to_local().device == HOST
        assert state[name].dtype == dtype
