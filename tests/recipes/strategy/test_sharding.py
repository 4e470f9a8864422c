"""What FSDP2 gathers together, when, and in which dtype; a block stays one graph of torch.compile."""

from abc import ABC
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from recipes.compile import compile_blocks
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.weights import initialize
from recipes.precision import Precision
from recipes.strategy.sharding import ShardPolicy, list_uncalled, shard_children, shard_model

NUM_LAYERS = 3
TOKENS = torch.arange(64).view(2, 32) % 512


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Join a process group of this process alone: its collectives are real, and nothing is sharded away."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(kind: str) -> nn.Module:
    with torch.device("meta"):
        if kind == "gpt2":
            return GPT2(vocab_size=512, max_seq_len=32, num_layers=NUM_LAYERS, num_heads=2, hidden_size=32, dropout=0.0)
        return Llama(
            vocab_size=512,
            max_seq_len=32,
            num_layers=NUM_LAYERS,
            num_heads=4,
            num_kv_heads=2,
            hidden_size=32,
            ffn_hidden_size=64,
            rope_theta=1e4,
            tie_embeddings=False,
        )


def make_policy(precision: str, *, reshard: bool = True, reduce_dtype: torch.dtype = torch.float32) -> ShardPolicy:
    return ShardPolicy(
        precision=Precision(name=precision),  # type: ignore[arg-type]
        offload=OffloadPolicy(),
        reshard_after_forward=reshard,
        reduce_dtype=reduce_dtype,
    )


def shard(model: nn.Module, precision: str, *, reshard: bool = True, reduce_dtype: torch.dtype = torch.float32) -> None:
    policy = make_policy(precision, reshard=reshard, reduce_dtype=reduce_dtype)
    shard_model(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), policy=policy, option="fsdp")


def fill(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    return model


def take_step(model: nn.Module, precision: str) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss: Tensor = model(TOKENS).float()[..., :512].logsumexp(-1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_compiled_block_is_one_graph_and_its_gradients_are_those_of_one_device(kind: str, precision: str) -> None:
    gradients, num_ops = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        num_ops[-1].append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    for is_sharded in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = make_model(kind)
        compile_blocks(model.blocks, mode="default")  # type: ignore[arg-type]
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=backend, dynamic=False)  # in its place: eager, and counted
        if is_sharded:
            shard(model, precision)
        fill(model)
        num_ops.append([])
        for _ in range(2):
            take_step(model, precision)
        assert not counters["graph_break"]
        grads = (parameter.grad for parameter in model.parameters())
        gradients.append([grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads])
    assert num_ops[0] == num_ops[1], "one graph for all blocks, the same with and without FSDP"
    assert len(num_ops[0]) == 1
    for ours, alone in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(ours, alone)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each all-gather adds the first parameter of its group, and its dtype."""
    log: list[str] = []
    inner = FSDPParamGroup.unshard

    def unshard(self: FSDPParamGroup, async_op: bool = False) -> None:
        was_gathered = self.is_unsharded or self._all_gather_result is not None
        inner(self, async_op)
        if not was_gathered and (self._all_gather_result is not None or self.is_unsharded):
            first = self.fsdp_params[0]
            log.append(f"{first._param_fqn} {str(first.param_dtype or first.orig_dtype).removeprefix('torch.')}")

    monkeypatch.setattr(FSDPParamGroup, "unshard", unshard)
    return log


def group_names(block: int) -> list[str]:
    return [f"blocks.{block}.attention.qkv.weight bfloat16", f"blocks.{block}.attention_norm.weight float32"]


def test_the_next_block_is_gathered_before_a_block_computes(gathers: list[str]) -> None:
    model = make_model("llama")
    shard(model, "bf16-mixed")
    fill(model)
    take_step(model, "bf16-mixed")  # FSDP2 learns the order of the backward pass
    gathers.clear()
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.attention.register_forward_hook(lambda *_, index=index: gathers.append(f"block {index} computes"))
        block.mlp.register_full_backward_hook(lambda *_, index=index: gathers.append(f"block {index} backward"))
    take_step(model, "bf16-mixed")
    assert gathers == [
        "norm.weight float32",  # of the root, the final norm alone
        "embedding.weight float32",
        *group_names(0),
        *group_names(1),
        "block 0 computes",
        *group_names(2),
        "block 1 computes",
        "head.weight bfloat16",
        "block 2 computes",
        # the head and the last block are still there; the embedding is not needed
        *reversed(group_names(1)),
        "block 2 backward",
        *reversed(group_names(0)),
        "block 1 backward",
        "block 0 backward",
    ]


def test_without_resharding_each_weight_is_gathered_once(gathers: list[str]) -> None:
    model = make_model("gpt2")
    shard(model, "bf16-mixed", reshard=False)
    fill(model)
    take_step(model, "bf16-mixed")
    gathers.clear()
    take_step(model, "bf16-mixed")
    assert sorted(gathers) == sorted({*gathers})
    assert len(gathers) == 2 * NUM_LAYERS + 1, "two groups a block, and the root with the tied embedding"


@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("16-mixed", torch.float16, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.bfloat16),
    ],
)
def test_matrices_are_gathered_in_the_compute_dtype_and_other_weights_as_they_are(
    precision: str, gathered: torch.dtype, reduced: torch.dtype
) -> None:
    model = make_model("llama")
    shard(model, precision, reduce_dtype=reduced)
    policies = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    policies[id(parameter.sharded_param)] = group.mp_policy
    for name, parameter in model.named_parameters():
        policy = policies[id(parameter)]
        is_matrix = parameter.dim() == 2 and name != "embedding.weight"
        assert policy.param_dtype == (gathered if is_matrix else torch.float32), name
        assert policy.reduce_dtype == reduced
        assert not policy.cast_forward_inputs


def test_gradients_reduced_in_bfloat16_are_those_in_float32_rounded() -> None:
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("gpt2")
        shard(model, "bf16-mixed", reduce_dtype=dtype)
        take_step(fill(model), "bf16-mixed")
        gradients.append({name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
    for name, exact in gradients[0].items():
        assert torch.equal(gradients[1][name], exact.bfloat16().float()), name


class AbstractFirst(ABC, nn.Linear):
    pass


class AbstractLast(nn.Linear, ABC):
    pass


def test_a_class_that_python_lets_nobody_replace_is_refused_with_the_order_of_its_bases() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    how: dict[str, Any] = {"mesh": mesh, "policy": make_policy("32-true"), "device": torch.device("cpu")}
    with pytest.raises(ConfigError, match=r"class AbstractFirst\(nn.Module, ABC\)"):
        shard_children(nn.Sequential(AbstractFirst(2, 2)), [], **how)
    [child] = shard_children(nn.Sequential(AbstractLast(2, 2)), [], **how)
    assert isinstance(child, FSDPModule)


def test_of_a_list_or_dict_of_modules_which_nothing_calls_each_member_is_a_unit() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    how: dict[str, Any] = {"mesh": mesh, "policy": make_policy("32-true"), "device": torch.device("cpu")}
    module = nn.Module()
    module.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "more": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})
    module.body = nn.Sequential(nn.Linear(2, 2), module.heads["a"])
    roots = shard_children(module, [], **how)
    assert roots == [module.heads["a"], module.heads["more"][0], module.body]
    assert list_uncalled(module) == []
    module.heads["more"].append(nn.ParameterList([torch.zeros(2)]))
    module.scale = nn.Parameter(torch.ones(()))
    assert list_uncalled(module) == ["scale", "heads.more.2.0"]
