"""Compiled blocks and chunks of the loss: no graph break for any model or adapter, and no graph per length."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recipes.adapter import NoAdapter
from recipes.adapter.ia3 import IA3
from recipes.adapter.lora import Lora
from recipes.compile import CompilationCounter, compile_blocks
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.moe import DeepSeekV3, MoeLlama
from recipes.model.weights import initialize
from recipes.numerics.head_loss import HeadLoss

V = 64
SIZE: dict[str, Any] = {"vocab_size": V, "max_seq_len": 320, "num_layers": 2, "num_heads": 2, "hidden_size": 64}
LLAMA = SIZE | {"num_kv_heads": 1, "ffn_hidden_size": 64, "rope_theta": 1e4}
EXPERTS = SIZE | {"num_kv_heads": 1, "moe_intermediate_size": 64, "rope_theta": 1e4}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
LATENT = {"num_kv_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2(**SIZE, dropout=0.0),
    "llama": lambda: Llama(**LLAMA),
    "experts": lambda: MoeLlama(**EXPERTS),
    "deepseek": lambda: DeepSeekV3(**EXPERTS | LATENT),
}
LORA = functools.partial(
    Lora,
    r=4,
    lora_alpha=8.0,
    lora_dropout=0.0,
    target_modules="all",
    use_rslora=False,
    use_dora=False,
    modules_to_save=[],
)
ADAPTERS: dict[str, Callable[[], Any]] = {
    "none": NoAdapter,
    "lora": LORA,
    "rslora": functools.partial(LORA, use_rslora=True),
    "dora": functools.partial(LORA, use_dora=True),
    "qlora": functools.partial(LORA, quantization="nf4"),
    "ia3": lambda: IA3(target_modules="all", feedforward_modules=["mlp.out"], modules_to_save=[]),
}
OFTEN = [("experts", "none"), ("gpt2", "lora")]
KINDS = [*((model, "none") for model in MODELS), *((model, name) for model in ("gpt2", "llama") for name in ADAPTERS)]


def make(model: str, adapter: str) -> nn.Module:
    with torch.device("meta"):
        made = MODELS[model]()
        ADAPTERS[adapter]().apply(made)
    made.to_empty(device="cpu")
    initialize(made, seed=0)
    return made


def run(model: nn.Module, loss: HeadLoss, lengths: list[int]) -> Tensor:
    """Return the objective of rows padded to the longest; with gradients in training, and else without."""
    generator = torch.Generator().manual_seed(len(lengths) + max(lengths))
    shape = (len(lengths), max(lengths))
    tokens, targets = (torch.randint(V, shape, generator=generator) for _ in range(2))
    num_inputs = torch.tensor(lengths)
    targets[torch.arange(shape[1]) >= num_inputs[:, None]] = -100
    with torch.set_grad_enabled(model.training):
        objective, *_ = model(tokens, reduce=functools.partial(loss, targets=targets), num_inputs=num_inputs)
        if model.training:
            objective.backward()
    return objective.detach()


@pytest.mark.parametrize(
    ("model", "adapter"),
    [*OFTEN, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in dict.fromkeys(KINDS) if kind not in OFTEN)],
)
def test_the_second_length_is_the_last_one_to_be_compiled_and_no_graph_breaks(model: str, adapter: str) -> None:
    torch.compiler.reset()
    counters.clear()
    eager, compiled = make(model, adapter), make(model, adapter)
    plain, chunks = (HeadLoss(vocab_size=V, chunk_tokens=100, label_smoothing=0.0, z_loss=0.0) for _ in range(2))
    counter = CompilationCounter()
    counter.attach()
    compile_blocks(compiled.blocks, mode="default", backend="aot_eager")  # type: ignore[arg-type]
    chunks.compile(backend="aot_eager")

    def check(lengths: list[int]) -> None:
        found, expected = run(compiled, chunks, lengths), run(eager, plain, lengths)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)

    check([64, 20])
    check([128, 128])
    for each in (eager, compiled):
        each.eval()
    check([128, 100])
    num_graphs = counters["stats"]["unique_graphs"]
    check([192, 30])  # validation
    for each in (eager, compiled):
        each.train()
    for lengths in ([192, 64], [256, 256], [320, 320], [10, 64]):
        check(lengths)
    counter.detach()
    # blocks and chunks: of the first length, of any length, and without gradients; where embeddings are frozen, the
    # input of the first block has no gradient, and that of the second has one
    assert counters["stats"]["unique_graphs"] == num_graphs <= (6 if adapter == "none" else 8)
    assert not counters["graph_break"]
    assert counter.describe() == f"compile: {num_graphs} graphs, {num_graphs - 2} recompilations, no graph breaks"
    wanted = {name: parameter.grad for name, parameter in eager.named_parameters() if parameter.grad is not None}
    assert wanted
    for name, parameter in compiled.named_parameters():
        if name in wanted:  # decompositions of the backward pass sum in another order
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_nothing_compiled_is_counted_after_a_counter_is_detached() -> None:
    counter = CompilationCounter()
    counter.attach()
    counter.detach()
    counter.detach()
    assert counter.describe() == "compile: no graphs, no recompilations, no graph breaks"


def test_peft_still_reads_a_weight_in_a_way_that_dynamo_cannot_trace() -> None:
    """If this fails, `_let_compilers_read_weights` in recipes/adapter/lora.py can go."""
    from peft.utils.integrations import dequantize_module_weight as original

    copied = types.FunctionType(original.__code__, original.__globals__)  # of which torch knows no substitute
    read = torch.compile(copied, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        read(nn.Linear(2, 2))
