"""What a machine cannot serve is rejected before anything is built, with the setting that works instead."""

import pytest
from support import resolved

from recipes.config import compose_and_check
from recipes.config import resolved as resolved_module
from recipes.config.check import devices
from recipes.config.check import strategy as strategy_check


def messages(*typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(typed)[1]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one GPU."""
    monkeypatch.setattr(resolved_module, "num_gpus", lambda: 1)


def test_tf32_without_a_gpu_names_float32() -> None:
    assert messages("precision=tf32") == ["precision=tf32: TF32 needs a GPU, and there is none; type precision=32-true"]


def test_another_mode_than_a_run_may_have_any_precision() -> None:
    assert messages("precision=tf32", "mode=plan", "plan.hardware=h100") == []


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_check.shutil, "which", lambda name: None)
    assert messages("compile=true") == [
        "compile=true: torch.compile writes C++ for a CPU, and there is no C++ compiler (c++);"
        " type apt install g++ (or yum install gcc-c++), or compile=false"
    ]
    assert messages("compile=auto") == [], "without a GPU nothing is compiled"


@pytest.mark.usefixtures("gpu")
def test_compiling_on_a_gpu_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages() == []
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    [message] = messages()
    assert message.startswith("compile=auto: torch.compile calls a C compiler for each kernel, and there is none")
    assert "or compile=false" in message
    assert messages("compile=false") == []


def test_cuda_graphs_without_a_gpu_name_the_other_modes() -> None:
    assert messages("compile=reduce-overhead") == [
        "compile=reduce-overhead: CUDA graphs need a GPU, and there is none;"
        " type compile=default, or compile=max-autotune-no-cudagraphs"
    ]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (["strategy=fsdp"], "strategy=fsdp gathers weights to other addresses at each step"),
        (["global_batch_size=32", "micro_batch_size=8"], "gradients accumulated over micro-batches"),
    ],
)
def test_cuda_graphs_need_addresses_that_do_not_change(typed: list[str], reason: str) -> None:
    [message] = messages("compile=reduce-overhead", *typed)
    assert reason in message
    assert messages("compile=reduce-overhead") == []


def test_an_unknown_mode_names_those_there_are() -> None:
    [message] = messages("compile=fastest")
    assert message.startswith(
        "compile=fastest: it takes true or false or auto or default or max-autotune-no-cudagraphs or reduce-overhead"
    )


def test_auto_compiles_on_a_gpu_and_not_under_stage_3() -> None:
    run = resolved({"compile": "auto", "trainer": {"accelerator": "auto"}, "strategy": {"_target_": "x.Other"}})
    of_stage_3 = run.with_settings({"strategy.stage": 3})
    assert run.compile_mode_on(gpu=True) == "default"
    assert run.compile_mode_on(gpu=False) is None
    assert of_stage_3.compile_mode_on(gpu=True) is None
    assert of_stage_3.with_settings({"compile": True}).compile_mode_on(gpu=True) == "default"
    assert run.with_settings({"compile": False}).compile_mode_on(gpu=True) is None
    assert run.with_settings({"compile": "reduce-overhead"}).compile_mode_on(gpu=True) == "reduce-overhead"


@pytest.mark.parametrize("name", ["cudnn", "memory_efficient"])
def test_attention_kernels_of_gpus_need_one(name: str) -> None:
    assert messages(f"attention={name}") == [
        f"attention={name}: it is a GPU kernel, and there is no GPU; type attention=auto"
    ]
    assert messages("attention=math") == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_flash_attention_on_a_gpu_needs_16_bits(name: str) -> None:
    assert messages(f"attention={name}") == [
        f"attention={name} precision=32-true: the kernel takes float16 and bfloat16 only;"
        " type attention=memory_efficient, or precision=bf16-mixed"
    ]
    assert messages(f"attention={name}", "recipe=single_bf16") == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_kernels_without_a_mask_take_no_packed_examples(name: str) -> None:
    typed = ["recipe=sft_demo", "precision=bf16-mixed", f"attention={name}"]
    assert messages(*typed) == [
        f"attention={name} data.packing=true: packed examples must not see each other, and the kernel takes no mask;"
        " type attention=auto, or data.packing=false"
    ]
    assert messages(*typed, "data.packing=false") == []
    assert messages("recipe=sft_demo", "attention=memory_efficient") == []


def test_dora_is_refused_where_weights_are_partitioned() -> None:
    typed = ["adapter=dora", "strategy=deepspeed_stage_3", "trainer.devices=2"]
    assert (
        "adapter.use_dora=true strategy=deepspeed_stage_3: DoRA needs the norms of the full frozen weights, and each"
        " rank has only a part of them; type strategy=fsdp, or adapter=lora"
    ) in messages(*typed)
    assert not [message for message in messages("adapter=lora", *typed[1:]) if "adapter" in message]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "strategy=deepspeed_stage_2",
            "adapter.quantization=nf4 strategy=deepspeed_stage_2: DeepSpeed broadcasts and partitions all weights as"
            " plain tensors, which weights in 4 bits are not; type strategy=fsdp, or adapter=lora",
        ),
        (
            "adapter.use_dora=true",
            "adapter.quantization=nf4 adapter.use_dora=true: DoRA computes row norms of the frozen weights in every"
            " step, which 4-bit storage does not provide; type adapter=qlora, or adapter=dora",
        ),
        (
            "precision=fp8-mixed",
            "adapter.quantization=nf4 precision=fp8-mixed: float8 products cast weights of 16 or 32 bits, and these"
            " have 4; type precision=bf16-mixed, or adapter=lora",
        ),
    ],
)
def test_weights_in_4_bits_are_refused_where_they_would_be_read_as_numbers(typed: str, message: str) -> None:
    assert message in messages("adapter=qlora", typed)
    assert not [found for found in messages("adapter=lora", typed) if "base" in found]
