"""Packed documents: the logits and gradients of each are those it has alone, whichever kernel computes attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from recipes.compile import compile_blocks
from recipes.model import decoder
from recipes.model.decoder import attend
from recipes.model.documents import Documents, block_mask, dense_mask, number_documents
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama

LENGTHS = [[5, 1, 10], [7, 9, 0]]  # of the documents of each row; the last of the second row is padding


def model_of(architecture: str) -> GPT2 | Llama:
    model: GPT2 | Llama
    common = {"vocab_size": 50, "max_seq_len": 16, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
    if architecture == "gpt2":
        model = GPT2(**common, dropout=0.0)
    else:
        model = Llama(
            **common, num_kv_heads=2, ffn_hidden_size=48, rope_theta=1e4, qk_norm=architecture == "llama_qk_norm"
        )
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0)  # logits of order 1 that depend on the whole context
    return model.double()


def packed() -> tuple[Tensor, Tensor]:
    """Return tokens and positions, [2, 16] each."""
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for row in LENGTHS for length in row])
    return tokens, positions.view(2, 16)


def test_positions_number_the_documents_of_each_row() -> None:
    numbers = number_documents(packed()[1])
    assert numbers[0].tolist() == [1] * 5 + [2] + [3] * 10
    assert numbers[1].tolist() == [1] * 7 + [2] * 9


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "llama_qk_norm"])
def test_a_packed_row_gives_the_logits_and_gradients_of_its_documents_alone(architecture: str) -> None:
    tokens, positions = packed()
    model = model_of(architecture)
    together = model(tokens, positions=positions)[..., :50]
    gradients = []
    alone = torch.stack([run_alone(model, row, lengths) for row, lengths in zip(tokens, LENGTHS, strict=True)])
    for logits in (together, alone):
        # in float64 all that is left is rounding
        torch.testing.assert_close(logits, together, rtol=1e-10, atol=1e-10)
        model.zero_grad()
        logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    without = model(tokens)[..., :50]
    assert (without - together).abs().max() > 0.1, "without positions, documents see each other: the test can fail"


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "llama_qk_norm"])
def test_branches_of_a_document_have_the_logits_and_gradients_of_rows_that_begin_alike(architecture: str) -> None:
    """The row is longer than `max_seq_len`, its branches are not."""
    model, drawn = model_of(architecture), torch.Generator().manual_seed(0)
    beginning, *rest = (torch.randint(0, 50, (length,), generator=drawn) for length in (9, 7, 3, 5))
    positions = torch.cat([torch.arange(9), *(torch.arange(9, 9 + len(own)) for own in rest)])
    branches = torch.cat([torch.zeros(9), *(torch.full_like(own, index) for index, own in enumerate(rest, start=1))])
    rows = model(torch.cat([beginning, *rest])[None], positions=positions[None], branches=branches[None])[0, :, :50]
    together = rows[9:].split([*map(len, rest)])
    alone = [model(torch.cat([beginning, own])[None])[0, 9:, :50] for own in rest]
    gradients = []
    for found in (together, alone):
        model.zero_grad()
        sum(logits.logsumexp(-1).sum() for logits in found).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    # keys are rotated in float32, and so is the sum of their gradients over the branches
    rounding = 1e-9 if architecture == "gpt2" else 1e-6
    for one, other in zip([*together, *gradients[0]], [*alone, *gradients[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


def run_alone(model: GPT2 | Llama, row: Tensor, lengths: list[int]) -> Tensor:
    documents = row.split([length for length in lengths if length])
    return torch.cat([model(document[None])[0, :, :50] for document in documents])


def test_blocks_allow_what_the_dense_mask_allows() -> None:
    positions = torch.cat([torch.arange(length) for length in (200, 1, 311)])[None]  # [1, 512], 4 x 4 blocks
    numbers = number_documents(positions)
    mask = block_mask(numbers)
    index = torch.arange(512)
    allowed = mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None])  # [512, 512]
    assert torch.equal(allowed, dense_mask(numbers)[0, 0])
    assert mask.sparsity() > 40, "blocks above the diagonal and between the documents are skipped"


def test_attention_by_blocks_equals_that_by_the_dense_mask() -> None:
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(length) for length in (60, 4, 192)])[None]  # [1, 256]
    queries, keys, values = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16), torch.randn(1, 2, 256, 16)
    dense = attend(queries, keys, values, dropout=0.0, cache=None, documents=Documents(positions, dropout=0.0))
    mask = block_mask(number_documents(positions))
    by_blocks = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(by_blocks, dense, rtol=1e-5, atol=1e-6)  # float32, other orders of the same sums


def test_a_compiled_block_is_one_graph_whatever_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients: on a CPU, torch has no backward pass of FlexAttention (2.13)."""

    class Blocked(Documents):
        def __init__(self, positions: Tensor, *, branches: None, dropout: float) -> None:
            self.mask = block_mask(number_documents(positions))  # as on a GPU

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if "flex" in node.name])
        return graph.forward

    torch.compiler.reset()
    counters.clear()
    model = model_of("llama").float()
    tokens = packed()[0]
    with torch.no_grad():
        expected = [model(tokens, positions=positions) for positions in (packed()[1], packed()[1].flip(0))]
        monkeypatch.setattr(decoder, "Documents", Blocked)
        compile_blocks(model.blocks, mode="default")
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
        for positions, logits in zip((packed()[1], packed()[1].flip(0)), expected, strict=True):
            # float32, logits up to 100 after matrices of eight times their size
            torch.testing.assert_close(model(tokens, positions=positions), logits, rtol=1e-4, atol=1e-3)
    assert graphs == [["flex_attention"]], "one for both blocks, and for other documents"
    assert not counters["graph_break"]
