"""Trials on two ranks: every engine passes the checks, and finds the learning rate and the noise of one device."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks
from support import ROOT, TINY, write_texts

WORKER = Path(__file__).parent / "trial_ranks.py"
QUICK = ["fsdp", "deepspeed_stage_2"]
LONG = ["ddp", "hsdp", "deepspeed_stage_1", "deepspeed_stage_3", "deepspeed_stage_2_offload"]
ENGINES = [*QUICK, *(pytest.param(engine, marks=pytest.mark.slow) for engine in LONG)]
SHOW_GRADIENTS = ("ddp", "fsdp", "hsdp")
HIDE_GRADIENTS = [
    "deepspeed_stage_2",
    *(pytest.param(engine, marks=pytest.mark.slow) for engine in LONG if engine not in SHOW_GRADIENTS),
]


def make_case(engine: str, world_size: int, text_folder: str) -> dict[str, Any]:
    overrides = [
        *TINY, f"data.path={text_folder}", "trainer.accelerator=cpu", f"strategy={engine}", "global_batch_size=16",
        f"trainer.devices={world_size}", f"micro_batch_size={4 // world_size}", "scheduler=constant", "warmup_steps=0",
    ]  # fmt: skip
    return {"overrides": overrides, "checks": world_size > 1, "trials": True}


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return what an engine found; one start of ranks serves one device, the quick engines and the others each."""
    text_folder = str(write_texts(tmp_path_factory.mktemp("texts")))

    @functools.cache
    def run(engines: tuple[str, ...], world_size: int) -> dict[str, Any]:
        cases = {engine: make_case(engine, world_size, text_folder) for engine in engines}
        folder = tmp_path_factory.mktemp("trials")
        return run_on_ranks(cases, world_size=world_size, folder=folder, worker=WORKER)

    def find(engine: str) -> dict[str, Any]:
        group = ("single",) if engine == "single" else tuple(QUICK if engine in QUICK else LONG)
        result: dict[str, Any] = run(group, 1 if engine == "single" else 2)[engine]
        assert "error" not in result, (engine, result["error"])
        return result

    return find


@pytest.mark.parametrize("engine", ENGINES)
def test_no_check_fails(engine: str, find: Callable[[str], dict[str, Any]]) -> None:
    checks = find(engine)["preflight"]["results"]
    assert [check for check in checks if check["status"] == "fail"] == []
    assert find(engine)["code"] == 0
    assert len(checks) >= 20


@pytest.mark.parametrize("engine", ENGINES)
def test_the_range_test_is_that_of_one_device(engine: str, find: Callable[[str], dict[str, Any]]) -> None:
    found, expected = find(engine)["lr_find"], find("single")["lr_find"]
    # until the loss is lost, which amplifies rounding
    quiet = [lr < 0.05 for lr in expected["learning_rates"]].index(False)
    assert quiet >= 15
    assert found["learning_rates"][:quiet] == pytest.approx(expected["learning_rates"][:quiet])
    assert found["losses"][:quiet] == pytest.approx(expected["losses"][:quiet], rel=1e-3)
    assert found["steepest"] == pytest.approx(expected["steepest"])
    assert 1e-4 < expected["steepest"] <= expected["lowest"] < expected["diverges"]


@pytest.mark.parametrize("engine", ["fsdp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ddp", "hsdp"))])
def test_the_noise_scale_is_that_of_one_device(engine: str, find: Callable[[str], dict[str, Any]]) -> None:
    found, expected = (find(name)["noise_scale"]["windows"] for name in (engine, "single"))
    for key in ("signal", "noise"):
        # differences of squared norms, each of which rounds to 1e-6
        assert [w[key] for w in found] == pytest.approx([w[key] for w in expected], rel=1e-3)


@pytest.mark.parametrize("engine", HIDE_GRADIENTS)
def test_an_engine_that_hides_gradients_names_those_that_show_them(
    engine: str, find: Callable[[str], dict[str, Any]]
) -> None:
    assert "type strategy=fsdp, or strategy=ddp" in find(engine)["mistake"]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_run_is_left(engine: str, find: Callable[[str], dict[str, Any]]) -> None:
    written = ["lr_find.json", "preflight.json"]
    assert find(engine)["left"] == sorted([*written, *(["noise_scale.json"] if engine in SHOW_GRADIENTS else [])])


LEFT_OUT = re.compile(
    r"^(context|pipeline|expert)_parallel_size:|override /data: (mixture|conversations|synthetic_tasks)", re.MULTILINE
)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_shipped_recipe_fails_a_check(world_size: int, tmp_path: Path) -> None:
    # disk access needs libaio; preflight refuses some divided models; others bring their own data
    recipes = (ROOT / "conf/recipe").glob("*.yaml")
    shipped = {path.stem: path.read_text() for path in recipes if "nvme" not in path.stem}
    names = sorted(name for name, text in shipped.items() if not LEFT_OUT.search(text))
    chosen = [name for name in names if name.startswith(("single", "quickstart")) == (world_size == 1)]
    assert len(chosen) >= 4
    text_folder = write_texts(tmp_path / "texts")
    common = [
        "tokenizer=bytes", "data=text_files", f"data.path={text_folder}", "trainer.accelerator=cpu",
        f"trainer.devices={world_size}", "model=gpt2_nano", "model.vocab_size=257", "model.num_layers=2",
        "model.num_heads=2", "model.hidden_size=32", "model.max_seq_len=32", "global_batch_size=8", "eval_samples=8",
    ]  # fmt: skip
    cases = {name: {"overrides": [f"recipe={name}", *common], "checks": True, "trials": False} for name in chosen}
    for name, result in run_on_ranks(cases, world_size=world_size, folder=tmp_path / "ranks", worker=WORKER).items():
        assert "error" not in result, (name, result["error"])
        failed = [check for check in result["preflight"]["results"] if check["status"] == "fail"]
        assert (name, failed) == (name, [])
