"""What is reported of GPUs and kernels, with torch.cuda replaced by that of other machines."""

from types import SimpleNamespace

import pytest
import torch
from gpu_checks import environment
from gpu_checks.environment import describe_gpus, find_failures


def _replace_cuda(monkeypatch: pytest.MonkeyPatch, *, names: list[str], capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(total_memory=85_520_809_984)
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: len(names),
        "get_device_name": names.__getitem__,
        "get_device_properties": lambda index: properties,
        "get_device_capability": lambda index: capability,
        "is_bf16_supported": lambda including_emulation: capability >= (8, 0),
        "can_device_access_peer": lambda first, second: second != 2,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def test_a_gpu_is_described_by_name_memory_and_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_cuda(monkeypatch, names=["NVIDIA H100 80GB HBM3"] * 3, capability=(9, 0))
    first, second, third = describe_gpus()
    assert first == {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_gib": 79.6,
        "capability": [9, 0],
        "has_bfloat16": True,
        "peer_of_the_first": True,
    }
    assert (second["peer_of_the_first"], third["peer_of_the_first"]) == (True, False)


def test_without_a_gpu_none_is_described_and_there_is_no_driver() -> None:
    assert describe_gpus() == []
    machine = environment.describe_machine()
    assert (machine["driver"], machine["nccl"], machine["cuda"]) == (None, None, None)
    assert machine["packages"]["torch"]


def test_the_driver_is_the_one_that_nvidia_smi_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> SimpleNamespace:
        assert command[0] == "nvidia-smi"
        return SimpleNamespace(stdout="580.65.06\n580.65.06\n")

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environment._read_driver() == "580.65.06"


WORKS = dict.fromkeys(environment.KERNELS, "works")
H100 = [{"capability": [9, 0]}]
T4 = [{"capability": [7, 5]}]


def test_one_fast_attention_kernel_is_enough_and_none_is_a_failure() -> None:
    fails = "RuntimeError: No available kernel"
    assert find_failures(WORKS | {"flash attention": fails, "cudnn attention": fails}, H100) == []
    slow = WORKS | {f"{kind} attention": fails for kind in ("flash", "efficient", "cudnn")}
    [failure] = find_failures(slow, H100)
    assert failure.startswith("none of flash attention, efficient attention, cudnn attention works")
    assert find_failures(slow, T4) == []


def test_bfloat16_and_tf32_are_needed_on_ampere_and_later_only() -> None:
    without = WORKS | {"bfloat16 matmul": "RuntimeError: emulated", "TF32 matmul": "RuntimeError: full float32"}
    assert find_failures(without, T4) == []
    assert find_failures(without, H100) == [
        "bfloat16 matmul: RuntimeError: emulated",
        "TF32 matmul: RuntimeError: full float32",
    ]
    assert find_failures(WORKS | {"torch.compile": "no triton"}, T4) == ["torch.compile: no triton"]


def test_each_kernel_is_tried_on_this_machine() -> None:
    cpu = torch.device("cpu")
    # torch.compile takes seconds: test_gpu_check.py tries it
    tried = {name: kernel for name, kernel in environment.KERNELS.items() if name != "torch.compile"}
    results = {name: environment._try(lambda k=kernel: k(cpu)) for name, kernel in tried.items()}
    assert results["fused AdamW"] == results["bfloat16 matmul"] == results["flash attention"] == "works"
    assert results["TF32 matmul"].startswith("RuntimeError: the product is in full float32")
    assert torch.get_float32_matmul_precision() == "highest"
