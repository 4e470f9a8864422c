"""The parity table: every strategy on its real engine, in CPU processes, compared with one device. About 5 minutes.

`python benchmarks/parity.py meshes` does the same for tensor, context, pipeline and expert parallelism, in 5 minutes;
`python benchmarks/parity.py preferences [<loss> …]` for the losses on preferences, in 5 each.
"""

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import report

os.environ["LONG_TESTS"] = "1"  # twenty steps
sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("parity", "")]

import test_preferences as preferences_cases  # noqa: E402
from cases import ENGINES, MESHES, MODELS, STRATEGIES, case, largest_difference  # noqa: E402
from ranks import run_on_ranks  # noqa: E402

MICRO_BATCHES = (1, 2, 4)
BF16_ORDERS = (2, 4, 8, 16)
LOGGED = ("train/loss", "grad/norm", "first")


def run(cases: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Run cases on ranks and return their results by name; exit if a case fails."""
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    results = run_on_ranks(cases, world_size=world_size, folder=folder, timeout_seconds=1800.0)
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
    return results


def differences(
    results: dict[str, Any], reference: dict[str, dict[str, Any]], world_size: int
) -> dict[str, dict[str, float]]:
    """Return each case's largest relative difference of loss and gradient norm from its reference."""
    found = {}
    for name, result in results.items():
        rows, expected = result["rows"], reference[name.split(" | ")[1]]["rows"]
        first = abs(rows[0]["grad/norm"] / expected[0]["grad/norm"] - 1)
        found[f"{name} | {world_size}"] = largest_difference(rows, expected) | {"first": first}
    return found


def one_device(model: str, precision: str) -> dict[str, Any]:
    """Return the reference case; batch norm depends on the micro-batch, so it has two, to match two ranks."""
    num_micro_batches = 2 if model == "resnet18" else 1
    return case(
        model,
        strategy=STRATEGIES["single"],
        precision=precision,
        accumulate=num_micro_batches,
        world_size=1,
    )


def grid(names: list[str], models: list[str], precision: str, world_size: int, splits: Any) -> dict:
    """Return the cases, keyed by `strategy | model, precision | micro-batches`."""
    return {
        f"{name} | {model}, {precision} | {accumulate}": case(
            model,
            strategy=STRATEGIES[name],
            precision=precision,
            accumulate=accumulate,
            world_size=world_size,
        )
        for name, model, accumulate in itertools.product(names, models, splits)
    }


# number of ranks; all other meshes use two
MESH_SIZES = {"tp2, cp2": 4, "tp2, two replicas": 4, "pp2, tp2": 4, "pp2, cp2": 4}
MESH_SIZES |= {"ep4": 4, "ep2, two replicas": 4, "ep4, cp2": 4}


def meshes() -> None:
    """Compare every mesh with one device; four layers, so that each of two ranks can hold two stages."""
    more = {"gpt2": ["model.num_layers=4"], "llama": ["model.num_layers=4", "model.num_kv_heads=2"], "experts": []}

    def make(name: str, model: str, split: int, ranks: int) -> dict[str, Any]:
        made = case(model, strategy=ENGINES[name], precision="32-true", accumulate=split, world_size=ranks)
        return made | {"overrides": [*made["overrides"], *more[model]]}

    reference = run({model: make("single", model, 1, 1) for model in more}, 1)
    groups: dict[int, dict[str, Any]] = {}
    for name, model in itertools.product(MESHES, more):
        if name.startswith("ep") != (model == "experts"):
            continue
        ranks = MESH_SIZES.get(name, 2)
        needed = 2 if name.startswith("pp2") else 1
        for split in (4,) if model == "llama" else (needed, 4):
            groups.setdefault(ranks, {})[f"{name} | {model} | {split}"] = make(name, model, split, ranks)
    groups[8] = {f"pp2, tp2 | {model} | 2": make("pp2, tp2", model, 2, 8) for model in ("gpt2", "llama")}
    groups[4]["ep2 | experts | 2"] = make("ep2", "experts", 2, 4)
    groups[4] |= {f"{name} | gpt2 | 2": make(name, "gpt2", 2, 4) for name in ("tp2", "cp2, ZeRO-3", "pp2")}
    rows = []
    for ranks, cases in sorted(groups.items()):
        found = differences(run(cases, ranks), reference, ranks)
        for name in dict.fromkeys(key.split(" | ")[0] for key in cases):
            row: dict[str, Any] = {"mesh": name, "ranks": ranks}
            for model in more:
                entries = [found[key] for key in found if key.startswith(f"{name} | {model} | ")]
                largest = [max(entry[key] for entry in entries) for key in LOGGED] if entries else []
                row[model] = ", ".join(f"{value:.1e}" for value in largest)
            rows.append(row)
    report("parity_meshes", rows, command="python benchmarks/parity.py meshes")


def preferences(losses: Sequence[str]) -> None:
    """Compare losses on preferences with one device, on the engines and splits of the test."""
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for loss in losses:
        print(loss, file=sys.stderr, flush=True)
        for ranks in (1, 2):
            cases = preferences_cases.make_cases(Path(tempfile.mkdtemp(prefix="preferences_")), world_size=ranks)
            cases = {name: made for name, made in cases.items() if json.loads(name)[0] == loss}
            found |= {tuple(json.loads(name)): result["rows"] for name, result in run(cases, ranks).items()}
    typed = " ".join(["python benchmarks/parity.py preferences", *losses])
    report("parity_preferences", list(list_by_engine(found, losses)), command=typed)


def list_by_engine(
    found: dict[tuple[Any, ...], list[dict[str, float]]], losses: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row per engine, with an adapter and without: the largest differences over all splits, for each loss.

    Args:
        found: Rows of metrics by (loss, engine, micro-batches, adapter).
        losses: The columns.
    """
    for engine, adapter in itertools.product(("single", *preferences_cases.ON_TWO), (False, True)):
        if engine == "tp2" and adapter:  # refused
            continue
        row: dict[str, Any] = {"engine": engine, "adapter": "lora" if adapter else ""}
        for loss in losses:
            names = [(loss, engine, split, adapter) for split in preferences_cases.SPLITS]
            runs = [found[name] for name in names if name in found]
            if not runs:  # refused
                row[loss] = ""
                continue
            reference = found[loss, "single", 1, adapter]
            entries = [largest_difference(of_run, reference) for of_run in runs]
            validated = [abs(of_run[-1]["val/loss"] / reference[-1]["val/loss"] - 1) for of_run in runs]
            largest = [max(entry[key] for entry in entries) for key in LOGGED[:2]] + [max(validated)]
            row[loss] = ", ".join(f"{value:.1e}" for value in largest)
        yield row


def main() -> None:
    models = [model for model in MODELS if model != "experts"]  # covered by `meshes` and tests/parity/test_moe.py
    pairs = [(model, "32-true") for model in models] + [("gpt2", "bf16-mixed")]
    reference = run({f"{model}, {precision}": one_device(model, precision) for model, precision in pairs}, 1)
    several = [name for name in STRATEGIES if name not in ("single", "hsdp")]
    others = [model for model in models if model != "gpt2"]
    found: dict[str, dict[str, float]] = {}
    alone = grid(["single", *several], ["gpt2"], "32-true", 1, MICRO_BATCHES)
    alone |= grid(["single"], ["gpt2"], "bf16-mixed", 1, BF16_ORDERS)
    found |= differences(run(alone, 1), reference, 1)
    two = grid(several, ["gpt2"], "32-true", 2, MICRO_BATCHES) | grid(several, others, "32-true", 2, [1])
    two |= grid(several, ["gpt2"], "bf16-mixed", 2, MICRO_BATCHES)
    found |= differences(run(two, 2), reference, 2)
    four = grid(["hsdp"], ["gpt2"], "32-true", 4, MICRO_BATCHES) | grid(["hsdp"], ["gpt2"], "bf16-mixed", 4, [1])
    found |= differences(run(four, 4), reference, 4)
    report("parity", table(found))


def table(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return a row per strategy and a column per experiment: the largest loss and norm differences over all splits."""
    columns = [
        ("gpt2, 32-true", 1),
        ("gpt2, 32-true", 2),
        ("gpt2, 32-true", 4),
        ("llama, 32-true", 2),
        ("resnet18, 32-true", 2),
        ("gpt2, bf16-mixed", 1),
        ("gpt2, bf16-mixed", 2),
        ("gpt2, bf16-mixed", 4),
    ]
    rows = []
    for name in STRATEGIES:
        row: dict[str, Any] = {"strategy": name}
        for experiment, num_ranks in columns:
            values = [
                entry
                for key, entry in found.items()
                if key.startswith(f"{name} | {experiment} | ") and key.endswith(f" | {num_ranks}")
            ]
            largest = [max(entry[key] for entry in values) for key in LOGGED] if values else []
            row[f"{experiment}, {num_ranks}"] = ", ".join(f"{value:.1e}" for value in largest)
        rows.append(row)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["preferences"]:
        preferences(sys.argv[2:] or preferences_cases.LOSSES)
    else:
        meshes() if sys.argv[1:] == ["meshes"] else main()
