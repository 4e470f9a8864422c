"""However activations are kept, loss, gradients and running statistics are those of the plain run, bit for bit."""

from collections import Counter
from typing import Any

import pytest
import torch
from small_models import MODELS, NONE, OPTIONS, TOKENS, make, train
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.activation_checkpoint.recompute import keep_products
from recipes.numerics import linear


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_every_option_gives_the_numbers_of_the_plain_run(model: str, option: str) -> None:
    plain, found = train(model, NONE), train(model, OPTIONS[option])
    assert torch.equal(plain.loss, found.loss)
    assert plain.gradients.keys() == found.gradients.keys()
    assert all(torch.equal(plain.gradients[name], found.gradients[name]) for name in plain.gradients)
    # a recomputed batch norm would see each batch twice
    assert all(torch.equal(plain.buffers[name], found.buffers[name]) for name in plain.buffers)


class CountOps(TorchDispatchMode):
    """Counts what reaches the device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _count(option: dict[str, Any]) -> Counter[str]:
    with CountOps() as counting:
        train("llama", option)
    return counting.counts


@pytest.fixture(params=["mm", "mkldnn::_linear_pointwise"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The operator of a matrix product: torch's, or that of processors on which oneDNN is faster."""
    name: str = request.param
    if name != "mm" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(linear, "ONEDNN_IS_FASTER", name != "mm")
    monkeypatch.setattr(linear, "_LEAST_WEIGHTS", 0)
    return name


def test_selective_repeats_no_product_and_no_attention_but_what_lies_between_them(product: str) -> None:
    plain, selective, whole = _count(NONE), _count(OPTIONS["selective"]), _count(OPTIONS["every block"])
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (selective[product], selective[attention]) == (plain[product], plain[attention])
    assert selective["silu"] == 2 * plain["silu"]
    # 2 micro-batches, 4 blocks of 5 products; nothing needs the result of the last, but an autograd function of Python
    # keeps its factors only after it has computed
    again = 4 if product == "mm" else 5
    assert whole[product] == plain[product] + 2 * 4 * again
    assert whole[attention] == 2 * plain[attention]


def test_every_second_product_repeats_the_others(product: str) -> None:
    plain, found = _count(NONE), _count(OPTIONS["selective, every second product"])
    assert found[product] == plain[product] + 2 * 4 * 2  # kept: the first, third and fifth


@pytest.mark.parametrize(("every_nth", "expected"), [(1, 8), (2, 6), (3, 6)])
def test_every_nth_block_is_recomputed(every_nth: int, expected: int) -> None:
    model = make("gpt2", {"every_nth_block": every_nth})
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    for block in model.blocks:
        block.mlp.register_forward_hook(count)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert num_forwards == expected


def test_attention_that_drops_weights_is_not_kept() -> None:
    """Its recomputation has to draw the same random numbers, for the dropout after it to draw those that follow."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    policy: Any = keep_products(1)
    assert policy(None, flash, 1, 2, 3) == CheckpointPolicy.MUST_SAVE
    assert policy(None, flash, 1, 2, 3, 0.0, True) == CheckpointPolicy.MUST_SAVE
    assert policy(None, flash, 1, 2, 3, 0.1, True) == CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, efficient, 1, 2, 3, None, True, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, efficient, 1, 2, 3, None, True, 0.0) == CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("option", ["every block", "selective", "selective, offload"])
def test_compiled_blocks_have_no_graph_break(option: str) -> None:
    from torch._dynamo.utils import counters

    plain = train("llama", NONE)
    torch._dynamo.reset()
    counters.clear()
    found = train("llama", OPTIONS[option], backend="aot_eager")
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1  # of all blocks
    for name, gradient in plain.gradients.items():
        # decompositions of the backward pass sum in another order
        assert torch.allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-6), name


def test_a_compiled_block_recomputes_what_a_budget_leaves_no_room_for() -> None:
    """Bytes that a compiled block saves for its backward pass, with all of its activations and with none."""

    def saved_bytes(budget: float) -> int:
        torch._dynamo.reset()
        model = make("llama", {"every_nth_block": 0, "memory_budget": budget})
        for block in model.blocks:
            block.compile(dynamic=False, backend="aot_eager_decomp_partition")
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.zeros(4, 16, dtype=torch.int64)).sum()
        return sum(storages.values())

    before = torch._functorch.config.activation_memory_budget
    assert saved_bytes(0.0) < 0.6 * saved_bytes(1.0)
    assert torch._functorch.config.activation_memory_budget == before


def test_parameters_keep_their_names() -> None:
    names = [name for name, _ in make("gpt2", NONE).named_parameters()]
    for option in OPTIONS.values():
        assert [name for name, _ in make("gpt2", option).named_parameters()] == names


def test_nothing_is_asked_of_a_model_that_keeps_everything() -> None:
    assert not ActivationCheckpoint(**NONE).changes_blocks
    assert all(ActivationCheckpoint(**option).changes_blocks for option in OPTIONS.values())
    assert ActivationCheckpoint(every_nth_block=0, memory_budget=0.5).changes_blocks


def test_frozen_blocks_on_frozen_inputs_compile_although_they_are_to_be_recomputed() -> None:
    """Torch fails to recompute attention in a graph without a backward pass."""
    model = make("gpt2", {"every_nth_block": 1})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.3.", "norm.")))
    for block in model.blocks:
        block.compile(dynamic=False, backend="aot_eager")
    model(TOKENS).float().logsumexp(-1).sum().backward()
    trained = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"blocks", "norm"}
