"""Which kernels attention may take: as chosen for the process, without cuDNN while text is generated."""

from collections.abc import Iterator

import pytest
import torch
from one_text import generate
from torch import Tensor

from recipes.model.decoder import attend, choose_attention_kernel
from recipes.model.gpt2 import GPT2

CUDA = torch.backends.cuda


def allowed() -> list[str]:
    states = {
        "flash": CUDA.flash_sdp_enabled(),
        "cudnn": CUDA.cudnn_sdp_enabled(),
        "memory_efficient": CUDA.mem_efficient_sdp_enabled(),
        "math": CUDA.math_sdp_enabled(),
    }
    return [name for name, enabled in states.items() if enabled]


@pytest.fixture(autouse=True)
def _any_kernel_again() -> Iterator[None]:
    yield
    choose_attention_kernel("auto")


@pytest.mark.parametrize("name", ["flash", "cudnn", "memory_efficient", "math"])
def test_a_kernel_by_name_is_the_only_one(name: str) -> None:
    choose_attention_kernel(name)
    assert allowed() == [name]
    choose_attention_kernel("auto")
    assert allowed() == ["flash", "cudnn", "memory_efficient", "math"]


def test_generated_text_does_without_cudnn() -> None:
    model = GPT2(vocab_size=50, max_seq_len=16, num_layers=1, num_heads=4, hidden_size=32, dropout=0.0)
    model.init_weights(0)
    found = []
    model.blocks[0].register_forward_hook(lambda *_: found.append(allowed()))
    generate(model, [1], 3, temperature=1.0, top_k=None, top_p=None, seed=0)
    assert found == [["flash", "memory_efficient", "math"]] * 3
    assert "cudnn" in allowed()


@pytest.mark.parametrize("name", ["auto", "math"])
def test_grouped_heads_give_the_same_whichever_kernel_computes(name: str) -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)

    def compute(dtype: torch.dtype) -> Tensor:
        return attend(queries.to(dtype), keys.to(dtype), values.to(dtype), dropout=0.0, cache=None)

    expected = compute(torch.float64)
    choose_attention_kernel(name)
    torch.testing.assert_close(compute(torch.float64), expected)
    torch.testing.assert_close(compute(torch.float32), expected.float(), rtol=1e-5, atol=1e-6)
