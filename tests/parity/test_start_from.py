"""Every engine starts from the weights of another run: to the last bit, with that run's validation loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import COMMON, IS_LONG, MODELS, TOKENS
from ranks import run_on_ranks
from start_ranks import run_case

from recipes.checkpoint.layout import is_shard
from recipes.checkpoint.saved_tensor import open_tensors

WORKER = Path(__file__).parent / "start_ranks.py"
ENGINES: dict[str, tuple[str, list[str]]] = {
    "fsdp": ("gpt2", ["strategy=fsdp"]),
    "ZeRO-3": ("gpt2", ["strategy=deepspeed_stage_3"]),
    "tp2": ("gpt2", ["strategy=fsdp", "tensor_parallel_size=2"]),
    "pp2": ("gpt2", ["strategy=fsdp", "pipeline_parallel_size=2"]),
}
if IS_LONG:
    ENGINES |= {
        "ddp": ("gpt2", ["strategy=ddp"]),
        "ZeRO-2, offload": ("gpt2", ["strategy=deepspeed_stage_2_offload"]),
        "fsdp, cpu offload": ("gpt2", ["strategy=fsdp", "strategy.cpu_offload=true"]),
        "ep2": ("experts", ["strategy=fsdp", "expert_parallel_size=2"]),
        "pp2, llama": ("llama", ["strategy=fsdp", "pipeline_parallel_size=2"]),
    }
WITH_ADAPTER = ["ZeRO-3", *(["fsdp"] if IS_LONG else [])]
RESUMED = ["fsdp", *(["ZeRO-3"] if IS_LONG else [])]
OF_RUN = [word for word in COMMON if not word.startswith(("trainer.max_steps", "eval_every", "save_every", "seed"))]


def _case(model: str, engine: list[str], *typed: str, steps: int = 2) -> dict[str, Any]:
    overrides = [*MODELS[model][0], *OF_RUN, *engine, f"trainer.max_steps={steps}", f"eval_every={steps}"]
    keys = [word.partition("=")[0] for word in typed]
    kept = [word for word in overrides if word.partition("=")[0] not in keys]
    return {"overrides": [*kept, f"save_every={steps}", *typed], "data": TOKENS}


def _still(engine: list[str], source: Path, *typed: str, model: str = "gpt2", seed: int = 8) -> dict[str, Any]:
    """Return a case of one step that changes no float32 weight."""
    still = [f"start_from={source}", "optimizer.lr=1e-30", f"seed={seed}", "micro_batch_size=4"]
    return _case(model, [*engine, "trainer.devices=2"], *still, *typed, steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start_from")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    sources = {f"source {model}": _case(model, ["strategy=single"], "seed=7") for model in sorted(_list_models())}
    found = {name: run_case(case, folder) for name, case in _placed(sources, folder).items()}
    cases: dict[str, Any] = {}
    of_one = place(folder, "source gpt2")
    for name, (model, engine) in ENGINES.items():
        cases[name] = _still(engine, place(folder, f"source {model}"), model=model)
    lora = ["adapter=lora", "adapter.r=2"]
    for name in WITH_ADAPTER:
        engine = ENGINES[name][1]
        cases[f"{name}, adapter"] = _case(
            "gpt2",
            [*engine, "trainer.devices=2"],
            *(f"start_from={of_one}", *lora, "optimizer.lr=0.01", "micro_batch_size=4", "seed=9"),
        )
        source = place(folder, f"{name}, adapter")
        cases[f"{name}, adapter, kept"] = _still(engine, source, *lora)
        cases[f"{name}, adapter, merged"] = _still(engine, source)
    # a checkpoint of one engine is read by another
    cases["chain"] = _still(ENGINES["ZeRO-3"][1], place(folder, "fsdp"))
    for name in RESUMED:
        typed = [f"start_from={of_one}", "micro_batch_size=4", "seed=9", "scheduler=constant"]
        engine = [*ENGINES[name][1], "trainer.devices=2"]
        cases[f"{name}, whole"] = _case("gpt2", engine, *typed, "save_every=2", steps=4)
        resumed = [*typed, f"resume={place(folder, f'{name}, half')}", "trainer.max_steps=4", "eval_every=4"]
        cases[f"{name}, half"] = _case("gpt2", engine, *typed)
        cases[f"{name}, resumed"] = _case("gpt2", engine, *resumed[1:], "save_every=2", steps=4)
    return found | run_on_ranks(_placed(cases, folder), world_size=2, folder=folder / "two", worker=WORKER)


def _list_models() -> set[str]:
    return {model for model, _ in ENGINES.values()}


def _placed(cases: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {name: case | {"folder": str(place(folder, name))} for name, case in cases.items()}


def place(folder: Path, name: str) -> Path:
    """Return the folder of a case, whose name needs no quotes on a command line."""
    return folder / name.replace(", ", "_").replace(" ", "_")


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = [path for path in (run / "checkpoints/last").iterdir() if is_shard(path.name)]
    found = {name: tensor.read() for name, tensor in open_tensors(files).items() if name.startswith("model.")}
    assert found
    return found


def find_loss(results: dict[str, Any], name: str) -> float:
    assert "error" not in results[name], results[name]["error"]
    loss: float = results[name]["rows"][-1]["val/loss"]
    return loss


@pytest.mark.parametrize("name", [*ENGINES, "chain"])
def test_the_weights_are_those_of_the_source_to_the_bit(name: str, results: dict[str, Any], folder: Path) -> None:
    model = "gpt2" if name == "chain" else ENGINES[name][0]
    # float32 sums over other shards of the validation split, as in the parity tests
    assert find_loss(results, name) == pytest.approx(find_loss(results, f"source {model}"), rel=1e-6)
    found, expected = weights(place(folder, name)), weights(place(folder, f"source {model}"))
    assert found.keys() == expected.keys()
    # the balance of experts moves in the step, whatever the learning rate
    kept = [key for key in expected if not key.endswith("router.bias")]
    assert all(torch.equal(found[key], expected[key]) for key in kept)
    assert len(results[name]["started_from"]) == (2 if name == "chain" else 1)
    assert any(line.startswith("  loaded: ") for line in results[name]["described"])


@pytest.mark.parametrize("name", WITH_ADAPTER)
def test_an_adapter_is_kept_or_merged_under_every_engine(name: str, results: dict[str, Any], folder: Path) -> None:
    trained = find_loss(results, f"{name}, adapter")
    assert trained != pytest.approx(find_loss(results, "source gpt2"), rel=1e-4), "it has learned something"
    assert find_loss(results, f"{name}, adapter, kept") == trained
    kept, expected = weights(place(folder, f"{name}, adapter, kept")), weights(place(folder, f"{name}, adapter"))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[key], tensor) for key, tensor in expected.items())
    # W + BA is rounded once in the merged weights, and x W + x BA in the layer
    assert find_loss(results, f"{name}, adapter, merged") == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_started_from_another_resumes_bit_for_bit(name: str, results: dict[str, Any], folder: Path) -> None:
    assert find_loss(results, f"{name}, resumed") == find_loss(results, f"{name}, whole")
    found, expected = weights(place(folder, f"{name}, resumed")), weights(place(folder, f"{name}, whole"))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert results[f"{name}, resumed"]["started_from"] == results[f"{name}, whole"]["started_from"]
