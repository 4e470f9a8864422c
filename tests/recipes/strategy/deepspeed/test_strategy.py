"""The config that DeepSpeed is given, for each stage, offload and precision; nothing is started."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.precision import Precision
from recipes.strategy.deepspeed.partition import ALIGNMENT, BUCKET_ELEMENTS, fit_buckets, gather_in_compute_dtype
from recipes.strategy.deepspeed.strategy import DeepSpeedZero, check_flat_weights

pytest.importorskip("deepspeed")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _unchanged_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what the constructor sets for the process."""
    import os

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    monkeypatch.setenv("PATH", os.environ["PATH"])


def make_config(
    *,
    stage: int = 1,
    offload_optimizer: str | None = None,
    offload_parameters: str | None = None,
    nvme_path: str | None = None,
    precision: str = "32-true",
) -> dict[str, Any]:
    strategy = DeepSpeedZero(
        devices=[CPU],
        precision=Precision(name=precision),  # type: ignore[arg-type]
        stage=stage,  # type: ignore[arg-type]
        offload_optimizer=offload_optimizer,  # type: ignore[arg-type]
        offload_parameters=offload_parameters,  # type: ignore[arg-type]
        nvme_path=nvme_path,
    )
    assert isinstance(strategy.config, dict)
    return strategy.config


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_is_passed_on_and_nothing_is_offloaded(stage: int) -> None:
    zero = make_config(stage=stage)["zero_optimization"]
    assert zero["stage"] == stage
    assert "offload_optimizer" not in zero
    assert "offload_param" not in zero
    assert zero["overlap_comm"] is False  # there is nothing to overlap with on a CPU


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_offloaded_optimizer_names_its_device_and_folder(device: str) -> None:
    zero = make_config(stage=2, offload_optimizer=device, nvme_path="/disk")["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == device
    assert zero["offload_optimizer"]["nvme_path"] == "/disk"
    assert zero["offload_optimizer"]["pin_memory"] is False
    assert "offload_param" not in zero


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_parameters_name_their_device_and_folder(device: str) -> None:
    zero = make_config(stage=3, offload_parameters=device, nvme_path="/disk")["zero_optimization"]
    assert zero["offload_param"]["device"] == device
    assert zero["offload_param"]["nvme_path"] == "/disk"
    assert "offload_optimizer" not in zero


@pytest.mark.parametrize(
    ("settings", "num_elements"),
    [
        ({"offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": "/disk"}, 10**8),
        ({"offload_optimizer": "nvme", "nvme_path": "/disk"}, 10**8),
        ({"offload_optimizer": "cpu", "offload_parameters": "cpu"}, 10**12),
        ({}, 10**12),
    ],
)
def test_a_disk_keeps_all_but_a_group_of_parameters_out_of_host_memory(
    settings: dict[str, Any], num_elements: int
) -> None:
    """DeepSpeed locks four buffers of a group's size in host memory: with one group for all, 16/N bytes a parameter."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = make_config(stage=3, **settings)["zero_optimization"]
    assert DeepSpeedZeroConfig(**zero).sub_group_size == num_elements


def test_several_threads_read_and_write_the_disk() -> None:
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    config = make_config(stage=3, offload_optimizer="nvme", nvme_path="/disk")
    assert get_aio_config(config)["intra_op_parallelism"] == 4


def test_any_optimizer_may_be_offloaded() -> None:
    """DeepSpeed would otherwise reject SGD in host memory."""
    assert make_config(offload_optimizer="cpu")["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("16-mixed", "float16")])
def test_a_mixed_precision_is_torchs_autocast_over_float32_weights(precision: str, dtype: str) -> None:
    config = make_config(precision=precision)
    assert config["torch_autocast"] == {
        "enabled": True,
        "dtype": dtype,
        "lower_precision_safe_modules": [],
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_single_precision_needs_no_autocast(precision: str) -> None:
    assert "torch_autocast" not in make_config(precision=precision)


@pytest.mark.parametrize(
    ("precision", "enabled"),
    [("32-true", False), ("bf16-mixed", False), ("16-mixed", False), ("bf16-true", True)],
)
def test_only_bf16_true_uses_deepspeeds_own_bfloat16_engine(precision: str, enabled: bool) -> None:
    """Lightning decides by the name of the plugin, so the mixed precisions must not bear theirs."""
    strategy = DeepSpeedZero(
        devices=[CPU],
        precision=Precision(name=precision),  # type: ignore[arg-type]
        stage=1,
        offload_optimizer=None,
        offload_parameters=None,
        nvme_path=None,
    )
    assert (strategy.precision_plugin.precision == "bf16-true") is enabled
    assert strategy.precision_plugin.precision in ("32-true", "bf16-true")


@pytest.mark.parametrize(
    ("num_elements", "bucket"),
    [
        (100, ALIGNMENT),  # never less
        (8 * ALIGNMENT * 5 + 9, 5 * ALIGNMENT),  # an eighth, aligned
        (10**10, BUCKET_ELEMENTS // ALIGNMENT * ALIGNMENT),  # never more
    ],
)
def test_buckets_hold_an_eighth_of_the_model_within_limits(num_elements: int, bucket: int) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(num_elements, device="meta"))
    zero: dict[str, Any] = {"stage": 3}
    fit_buckets(zero, model)
    assert zero == {"stage": 3, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}


def test_a_buffer_of_offloaded_parameters_holds_the_largest_one() -> None:
    model = torch.nn.Linear(3 * ALIGNMENT, 2, device="meta")
    zero: dict[str, Any] = {"offload_param": {"device": "nvme"}}
    fit_buckets(zero, model)
    assert zero["offload_param"]["buffer_size"] == 6 * ALIGNMENT


def test_zero_3_gathers_linear_layers_of_blocks_in_the_compute_dtype_and_reduces_in_float32() -> None:
    from deepspeed.runtime.base_optimizer import get_comm_dtype
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    model = GPT2(vocab_size=8, max_seq_len=4, num_layers=2, num_heads=2, hidden_size=8, dropout=0.0)
    optimizer = SimpleNamespace(get_param_comm_dtype=get_comm_dtype)
    gather_in_compute_dtype(model.blocks, optimizer, torch.bfloat16)
    linear = {
        f"{name}.{kind}"
        for name, module in model.blocks.named_modules()
        for kind in ("weight", "bias")
        if isinstance(module, nn.Linear)
    }
    assert len(linear) == 16
    for name, parameter in model.named_parameters():
        expected = torch.bfloat16 if name.removeprefix("blocks.") in linear else torch.float32
        assert get_allgather_dtype(parameter, parameter) == expected, name
        assert optimizer.get_param_comm_dtype(parameter) == torch.float32


class LayerwiseRate(torch.optim.Optimizer):
    """The rate of a tensor is proportional to its norm, as in LARS (arXiv 1708.03888)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data -= group["lr"] * weight.data.norm() / weight.grad.norm() * weight.grad


class SignOfMomentum(torch.optim.Optimizer):
    """Each number is updated by itself."""

    def __init__(self, params: Any, lr: float, asks: bool = False) -> None:
        super().__init__(params, {"lr": lr, "asks": asks})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["asks"]:
                raise ValueError("no graph")
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.mul_(0.9).add_(weight.grad)
                weight.data -= group["lr"] * momentum.sign()


def test_an_optimizer_that_computes_with_whole_tensors_is_refused_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 3))]
    before = [weight.clone() for weight in weights]
    random_state = torch.random.get_rng_state()
    for known in (SignOfMomentum(weights, lr=0.0), torch.optim.RMSprop(weights), torch.optim.AdamW(weights)):
        torch.optim.lr_scheduler.ConstantLR(known)  # binds the step to the optimizer
        check_flat_weights(known)
    assert not caplog.records
    for whole in (LayerwiseRate(weights, lr=0.0), torch.optim.Adafactor(weights)):
        with pytest.raises(ConfigError, match=f"{type(whole).__name__}: it computes with whole tensors"):
            check_flat_weights(whole)
    check_flat_weights(SignOfMomentum(weights, lr=0.0, asks=True))
    assert "it could not be tried on such ones (no graph)" in caplog.text
    assert torch.equal(weights[0], before[0])
    assert torch.equal(torch.random.get_rng_state(), random_state)
