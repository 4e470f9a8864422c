"""Adapters under every strategy: the curve of one device, checkpoints that hold them alone, and a resume to the bit."""

from pathlib import Path
from typing import Any

import pytest
from cases import IS_LONG, STRATEGIES, case, largest_difference
from ranks import run_on_ranks

from recipes.adapter import is_adapter
from recipes.checkpoint.saved_tensor import open_tensors

RESUME = Path(__file__).parent / "resume_ranks.py"
# each way in which engines hold frozen weights; ZeRO-3 partitions them, and DoRA would have to read them
SHORT = {
    "lora": ("fsdp", "ZeRO-3"),
    "qlora": ("fsdp",),
}
LONG = {
    "lora": ("ddp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2, offload"),
    "dora": ("ddp", "fsdp"),
    "ia3": ("fsdp", "ZeRO-3"),
    "qlora": ("ddp", "fsdp, cpu offload", "hsdp"),
}
ON_TWO = {
    f"{adapter}, {name}": (adapter, name)
    for adapters in (SHORT, *([LONG] if IS_LONG else []))
    for adapter, names in adapters.items()
    for name in names
}
ON_ONE = {f"{adapter}, 1": (adapter, "single") for adapter in ("lora", "dora", "ia3", "qlora")}
RESUMED = [
    "lora, ZeRO-3",
    "qlora, fsdp",
    *(["lora, ddp", "lora, fsdp", "lora, ZeRO-2, offload", "dora, fsdp", "qlora, ddp"] if IS_LONG else []),
]
# NF4 takes layers whose inputs divide into blocks of 64
WIDER = ["model.hidden_size=64", "model.ffn_hidden_size=128"]
VARIANTS = {
    "qlora, recomputed": ["activation_checkpoint=full"],
    "qlora, all at once": ["micro_batch_size=16"],
    "qlora, bf16-mixed": ["precision=bf16-mixed"],
}


def make_case(entry: tuple[str, str], *more: str, world_size: int) -> dict[str, Any]:
    adapter, name = entry
    made = case("llama", strategy=STRATEGIES[name], precision="32-true", accumulate=2, world_size=world_size)
    learning_rate = "optimizer.lr=3e-2"  # few weights
    # at this rate rounding grows tenfold a step from the tenth on, also between two splits on one device: 2e-6 to 2e-3
    steps = ("trainer.max_steps=8", "eval_every=8")
    wider = WIDER if adapter == "qlora" else []
    return made | {"overrides": [*made["overrides"], *steps, f"adapter={adapter}", learning_rate, *wider, *more]}


@pytest.fixture
def curve(rows: Any) -> Any:
    def find(name: str) -> list[dict[str, float]]:
        entries, size = (ON_TWO, 2) if name in ON_TWO else (ON_ONE, 1)
        cases = {key: make_case(entry, world_size=size) for key, entry in entries.items()}
        if size == 1:
            cases |= {key: make_case(("qlora", "single"), *more, world_size=1) for key, more in VARIANTS.items()}
        found: list[dict[str, float]] = rows(f"adapters on {size}", cases, name, world_size=size)
        return found

    return find


@pytest.mark.parametrize("name", ON_TWO)
def test_an_adapter_has_the_curve_of_one_device(name: str, curve: Any) -> None:
    alone = curve(f"{ON_TWO[name][0]}, 1")
    difference = largest_difference(curve(name), alone)
    # float32: other orders of the same sums, at the learning rate of few weights
    assert difference["train/loss"] < 1e-5
    assert difference["grad/norm"] < 1e-3
    assert all(row["grad/norm"] > 0 for row in alone)


def test_recomputing_blocks_beside_weights_in_4_bits_changes_no_bit(curve: Any) -> None:
    recomputed, alone = curve("qlora, recomputed"), curve("qlora, 1")
    for key in ("train/loss", "grad/norm"):
        assert [row[key] for row in recomputed] == [row[key] for row in alone]


def test_micro_batches_beside_weights_in_4_bits_have_the_curve_of_one(curve: Any) -> None:
    difference = largest_difference(curve("qlora, all at once"), curve("qlora, 1"))
    assert difference["train/loss"] < 1e-5  # as between strategies
    assert difference["grad/norm"] < 1e-3


def test_weights_in_4_bits_learn_in_bf16_mixed(curve: Any) -> None:
    difference = largest_difference(curve("qlora, bf16-mixed"), curve("qlora, 1"))
    assert 0 < difference["train/loss"] < 1e-2  # products of 8 bits of mantissa


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    more = ["trainer.max_steps=3", "save_every=2", "eval_every=3"]
    cases = {name: make_case(ON_TWO[name], *more, world_size=2) for name in RESUMED}
    found = run_on_ranks(cases, world_size=2, folder=folder, worker=RESUME)
    return {name: found[name] | {"folder": folder / f"results.json.{n}"} for n, name in enumerate(cases)}


@pytest.mark.parametrize("name", RESUMED)
def test_an_adapter_resumes_bit_for_bit_from_a_checkpoint_of_it_alone(name: str, resumed: dict[str, Any]) -> None:
    result = resumed[name]
    assert "error" not in result, result["error"]
    for key in ("train/loss", "grad/norm", "val/loss"):
        assert result["resumed"][key] == result["uninterrupted"][key], key
    checkpoint = result["folder"] / "uninterrupted/checkpoints/step_0000002.ckpt"
    saved = open_tensors(checkpoint.glob("rank_*.safetensors"))
    weights = [key for key in saved if key.startswith("model.")]
    assert weights
    assert all(is_adapter(key) for key in weights), "the frozen weights are not in it"
