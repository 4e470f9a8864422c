"""Llama: rotary positions in float32 whatever the precision, grouped queries, first loss."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recipes.errors import ConfigError
from recipes.model import llama_block
from recipes.model.llama import Llama
from recipes.model.llama_block import RMSNorm
from recipes.model.rope import Rotation, rope_tables, rotate

torch.set_num_threads(1)

SETTINGS = {
    "vocab_size": 100,
    "max_seq_len": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "rope_theta": 10000.0,
}


def small(**changes: object) -> Llama:
    model = Llama(**(SETTINGS | changes))  # type: ignore[arg-type]
    model.init_weights(0)
    return model


def tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: Llama) -> torch.Tensor:
    return F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1, dims=1).flatten())


def test_first_loss_is_ln_of_the_vocabulary() -> None:
    # Logits of std 0.02 sqrt(W) = 0.11; one sample of 32 targets moves the mean by 0.02.
    assert loss_of(small()).item() == pytest.approx(math.log(100), abs=0.05)


@pytest.mark.parametrize("move", ["bfloat16", "to_empty", "meta"])
def test_rotary_tables_stay_float32_and_right_through_every_move(move: str) -> None:
    expected = small().rope_cos.clone()
    if move == "bfloat16":
        model = small().to(torch.bfloat16)
        assert model.embedding.weight.dtype == torch.bfloat16
        assert model(tokens()).dtype == torch.bfloat16
    elif move == "to_empty":
        model = small().to_empty(device="cpu")
        model.init_weights(0)
    else:
        with torch.device("meta"):
            model = Llama(**SETTINGS, tie_embeddings=True)  # type: ignore[arg-type]
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        model.init_weights(0)
        assert model.head.weight is model.embedding.weight
    assert model.rope_cos.dtype == torch.float32
    assert torch.equal(model.rope_cos, expected)
    assert not [name for name in model.state_dict() if "rope" in name]


def test_positions_stay_float32_where_fsdp_casts_the_inputs_of_blocks_to_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def spy(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        seen.append((heads.dtype, rotation.cos.dtype))
        return rotate(heads, rotation)

    monkeypatch.setattr(llama_block, "rotate", spy)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = small()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model(tokens())
    finally:
        dist.destroy_process_group()
    assert seen == [(torch.bfloat16, torch.float32)] * 2


def test_scores_of_rotated_heads_depend_on_the_distance_alone() -> None:
    cos, sin = rope_tables(64, head_size=8, theta=10000.0, scaling_factor=None)
    rotation = Rotation(cos=cos[:, None], sin=sin[:, None])
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    queries = rotate(query.expand(1, 64, 1, 8), rotation)[0, :, 0]  # [T, Q]
    keys = rotate(key.expand(1, 64, 1, 8), rotation)[0, :, 0]
    scores = queries @ keys.T  # [T, T]
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        # float32 cosines of angles up to 64 are good to about 1e-6.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_grouped_queries_equal_full_heads_whose_keys_and_values_are_copies() -> None:
    grouped, full = small(num_layers=1), small(num_layers=1, num_kv_heads=4)
    full.load_state_dict(
        {name: value for name, value in grouped.state_dict().items() if "qkv" not in name},
        strict=False,
    )
    queries, keys, values = grouped.blocks[0].attention.qkv.weight.split((32, 16, 16))
    copies = [part.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32) for part in (keys, values)]
    with torch.no_grad():
        full.blocks[0].attention.qkv.weight.copy_(torch.cat((queries, *copies)))
    # The same sums in matrices of another size: rounding of logits of order 0.1.
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=0, atol=1e-6)


def test_rms_norm_of_bfloat16_takes_its_statistics_in_float32() -> None:
    norm = RMSNorm(4096, eps=1e-5)
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    x[0, 0] = 100.0
    exact = 3.0 / math.sqrt((4095 * 9.0 + 1e4) / 4096 + 1e-5)
    assert norm(x).dtype == torch.bfloat16
    # One rounding to bfloat16, relative 2^-9, of x / rms and one of the weight's product. A square
    # or a mean kept in bfloat16 is off by as much again, a sum kept in it stops growing at 2304.
    assert norm(x)[0, 1].item() == pytest.approx(exact, rel=2**-8)


def test_rms_norm_equals_torchs() -> None:
    norm, reference = RMSNorm(64, eps=1e-5), torch.nn.RMSNorm(64, eps=1e-5)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(norm(x), reference(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_compiled_blocks_have_no_graph_break_and_are_compiled_once_for_all_steps(
    qk_norm: bool,
) -> None:
    eager, compiled = small(qk_norm=qk_norm), small(qk_norm=qk_norm)
    torch.compiler.reset()
    for block in compiled.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    loss_of(eager).backward()
    loss_of(compiled).backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled.zero_grad()
        loss_of(compiled).backward()  # a second step, with other Rotation objects
    for ours, reference in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, r"model\.num_heads=3: .* type model\.hidden_size=33"),
        ({"num_kv_heads": 3}, r"model\.num_kv_heads=3: .* type model\.num_kv_heads=1"),
        ({"head_dim": 7}, r"model\.head_dim=7: .* type model\.head_dim=8"),
    ],
)
def test_heads_that_do_not_fit_are_rejected_with_a_value_that_fits(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**changes)
