"""A frozen teacher under every engine: the curve of a plain loop; its weights are held as planned and never saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import ENGINES, GLOBAL_BATCH_SIZE, IS_LONG, TOKENS, case, largest_difference
from distillation_ranks import run_case
from ranks import run_on_ranks
from support import MaskedTokens, composed_config, resolved

from recipes.data.order import ShuffledOrder
from recipes.model.flops import flops_per_sample
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained
from recipes.numerics.loss import IGNORE_INDEX
from recipes.plan.hardware import find_cluster
from recipes.plan.memory import timeline, with_zero
from recipes.plan.plan import make_plan
from recipes.plan.recorded import record_config
from recipes.plan.trace import FROZEN
from recipes.scheduler import warmup_cosine

NUM_STEPS, MIDDLE = 20, 12
WEIGHT, TEMPERATURE, LR = 0.7, 2.0, 1e-3
TEACHER: dict[str, Any] = {
    "vocab_size": 64,
    "max_seq_len": 16,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "hidden_size": 48,
    "ffn_hidden_size": 96,
    "rope_theta": 10_000.0,
}
# engine, micro-batches; of each way to hold the weights one is saved and resumed
ON_ONE = {"single": ("single", 4)} | ({"single, at once": ("single", 1)} if IS_LONG else {})
_LONG = ("ZeRO-1", "cp2, ddp", "cp2, fsdp", "fsdp, cpu offload", "fsdp, gradient sync per step", "ZeRO-2, offload")
ON_TWO = {name: (name, 2) for name in ("ddp", "fsdp", "ZeRO-2", *(_LONG if IS_LONG else ()))}
RESUMED = ("single", "fsdp", *(("ddp", "ZeRO-1", "ZeRO-2") if IS_LONG else ()))


def make_student() -> GPT2:
    return GPT2(vocab_size=64, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=32, dropout=0.0)


def make_teacher(folder: Path, *, seed: int) -> Path:
    model = Llama(**TEACHER, tie_embeddings=False)
    initialize(model, seed=seed)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # sure of itself
    export_pretrained(model, folder)
    return folder


@pytest.fixture(scope="session")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return make_teacher(folder / "one", seed=1), make_teacher(folder / "other", seed=2)


def make_case(name: str, teachers: tuple[Path, Path], *, world_size: int) -> dict[str, Any]:
    engine, accumulate = (ON_ONE | ON_TWO)[name]
    made = case("gpt2", strategy=ENGINES[engine], precision="32-true", accumulate=accumulate, world_size=world_size)
    of_teacher = [f"teacher.{key}={value}" for key, value in TEACHER.items()]
    saves = [f"save_every={MIDDLE}"] if name in RESUMED else []
    overrides = [
        *made["overrides"],
        *("task=distillation", f"task.teacher_weight={WEIGHT}", f"task.temperature={TEMPERATURE}"),
        *("model@teacher=llama_nano", *of_teacher, "teacher.tie_embeddings=false", f"teacher.pretrained={teachers[0]}"),
        *(f"trainer.max_steps={NUM_STEPS}", f"eval_every={NUM_STEPS}", *saves),
    ]
    return made | {"overrides": overrides, "middle": MIDDLE, "other": str(teachers[1])}


@pytest.fixture(scope="module")
def found(teachers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ON_ONE:
        results[name] = run_case(make_case(name, teachers, world_size=1), tmp_path_factory.mktemp("alone"))
    cases = {name: make_case(name, teachers, world_size=2) for name in ON_TWO}
    worker, folder = Path(__file__).parent / "distillation_ranks.py", tmp_path_factory.mktemp("frozen")
    results |= run_on_ranks(cases, world_size=2, folder=folder, worker=worker)
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
    return results


@pytest.fixture(scope="module")
def plain(teachers: tuple[Path, Path]) -> list[dict[str, float]]:
    """Return losses and norms of a loop that knows nothing of this project but its models, order and schedule."""
    model = make_student()
    initialize(model, seed=7)
    teacher = Llama(**TEACHER, tie_embeddings=False, pretrained=str(teachers[0]))
    initialize(teacher, seed=0)
    data, order = MaskedTokens(num_samples=50, seq_len=16, vocab_size=64), ShuffledOrder(50, 7)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    rows = []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * warmup_cosine(step, num_steps=NUM_STEPS, warmup_steps=5, min_lr_factor=0.1)
        indices = order.indices(step * GLOBAL_BATCH_SIZE + np.arange(GLOBAL_BATCH_SIZE)).tolist()
        samples = [data[index] for index in indices]
        inputs, targets = (torch.stack([sample[name] for sample in samples]) for name in ("inputs", "targets"))
        is_target = targets != IGNORE_INDEX
        optimizer.zero_grad()
        logits = model(inputs)[is_target]  # [targets, V]
        with torch.no_grad():
            wanted = teacher(inputs)[is_target]
        loss = F.cross_entropy(logits, targets[is_target])
        own, wanted = (F.log_softmax(each / TEMPERATURE, dim=-1) for each in (logits, wanted))
        divergence = F.kl_div(own, wanted, log_target=True, reduction="batchmean")
        ((1 - WEIGHT) * loss + WEIGHT * TEMPERATURE**2 * divergence).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        squared = TEMPERATURE**2 * divergence.item()
        rows.append({"train/loss": loss.item(), "grad/norm": norm.item(), "train/divergence": squared})
    return rows


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO])
def test_the_curve_is_that_of_a_plain_loop(name: str, found: dict[str, Any], plain: list[dict[str, float]]) -> None:
    difference = largest_difference(found[name]["rows"], plain)
    # float32: other orders of the same sums
    assert difference["train/loss"] < 1e-5
    assert difference["grad/norm"] < 1e-4
    for row, other in zip(found[name]["rows"], plain, strict=True):
        assert row["train/divergence"] == pytest.approx(other["train/divergence"], rel=1e-4)


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO])
def test_the_teacher_is_the_same_to_the_bit_after_twenty_steps(name: str, found: dict[str, Any]) -> None:
    before, after = found[name]["seen"]
    assert before["hash"] == after["hash"]
    for seen in (before, after):
        assert seen["is_frozen"]
        assert seen["in_eval_mode"]
        assert not seen["in_state"]
        assert seen["num_optimized"] == 0


@pytest.mark.parametrize("name", [name for name in (*ON_ONE, *ON_TWO) if "offload" not in name and "cp2" not in name])
def test_the_teacher_takes_the_memory_that_was_planned(
    name: str, found: dict[str, Any], teachers: tuple[Path, Path]
) -> None:
    size = 1 if name in ON_ONE else 2
    run = resolved(composed_config(*make_case(name, teachers, world_size=size)["overrides"]) | {"data": TOKENS})
    cluster = find_cluster("l4x2", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    recorded = record_config(run, cluster, computes=False)
    moments = [*timeline(recorded.ops)]
    if recorded.engine.zero is not None:
        zero, count = recorded.engine.zero, recorded.num_parameters
        moments = [
            *with_zero(moments, zero, num_parameters=count, num_trained=count, num_forward_only=0, accumulates=True)
        ]
    assert {moment.held[FROZEN] for moment in moments} == {found[name]["seen"][0]["held_bytes"]}


def test_a_planned_checkpoint_holds_the_student_alone(teachers: tuple[Path, Path]) -> None:
    run = resolved(composed_config(*make_case("single", teachers, world_size=1)["overrides"]) | {"data": TOKENS})
    cluster = find_cluster("l4", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    planned = make_plan(run, cluster, rates=None)
    assert planned.checkpoint_bytes == pytest.approx(12 * planned.num_parameters, rel=0.01), "weights and two moments"
    assert planned.flops is not None
    counts = [flops_per_sample(model, (16,)) for model in (make_student(), Llama(**TEACHER, tie_embeddings=False))]
    own, of_teacher = (each.palm for each in counts if each is not None)
    assert planned.flops.palm == own + of_teacher / 3, "of the teacher the forward pass alone"


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_holds_the_student_alone_and_a_resume_goes_on_to_the_bit(name: str, found: dict[str, Any]) -> None:
    result = found[name]
    weights = {key for key in result["saved"] if key.startswith("model.")}
    student = make_student()
    assert weights == {f"model.{key}" for key, _ in student.named_parameters()}
    assert not [key for key in result["saved"] if "teacher" in key or "mlp.gate" in key]
    for key in ("train/loss", "grad/norm"):
        assert [row[key] for row in result["resumed"]] == [row[key] for row in result["rows"][MIDDLE:]], key


@pytest.mark.parametrize("name", RESUMED)
def test_another_teacher_is_rejected_at_a_resume(name: str, found: dict[str, Any]) -> None:
    assert "they have other values than when the run was trained beside" in found[name]["rejected"]
