"""The parity table: every strategy on its real engine, on CPU processes, against one device. About five minutes."""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("parity", "")]

from cases import MODELS, STRATEGIES, case, largest_difference  # noqa: E402
from ranks import run_on_ranks  # noqa: E402

PASSES = (1, 2, 4)
BF16_ORDERS = (2, 4, 8, 16)
LOGGED = ("train/loss", "grad/norm", "first")


def run(cases: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Results by name; a case that fails ends the benchmark."""
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    results = run_on_ranks(cases, world_size=world_size, folder=folder, timeout_seconds=1800.0)
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
    return results


def differences(
    results: dict[str, Any], reference: dict[str, dict[str, Any]], world_size: int
) -> dict[str, dict[str, float]]:
    """Largest relative difference of loss and norm of every case from its reference."""
    found = {}
    for name, result in results.items():
        rows, expected = result["rows"], reference[name.split(" | ")[1]]["rows"]
        first = abs(rows[0]["grad/norm"] / expected[0]["grad/norm"] - 1)
        found[f"{name} | {world_size}"] = largest_difference(rows, expected) | {"first": first}
    return found


def one_device(model: str, precision: str) -> dict[str, Any]:
    """The reference; with batch normalisation the micro-batch belongs to the experiment, two passes for two ranks."""
    passes = 2 if model == "resnet18" else 1
    words = STRATEGIES["single"]
    return case(model, strategy=words, precision=precision, accumulate=passes, world_size=1)


def grid(names: list[str], models: list[str], precision: str, world_size: int, passes: Any) -> dict:
    """Cases by `strategy | model, precision | passes`."""
    return {
        f"{name} | {model}, {precision} | {accumulate}": case(
            model,
            strategy=STRATEGIES[name],
            precision=precision,
            accumulate=accumulate,
            world_size=world_size,
        )
        for name, model, accumulate in itertools.product(names, models, passes)
    }


def main() -> None:
    pairs = [(model, "32-true") for model in MODELS] + [("gpt2", "bf16-mixed")]
    reference = run(
        {f"{model}, {precision}": one_device(model, precision) for model, precision in pairs}, 1
    )
    several = [name for name in STRATEGIES if name not in ("single", "hsdp")]
    others = [model for model in MODELS if model != "gpt2"]
    found: dict[str, dict[str, float]] = {}
    alone = grid(["single", *several], ["gpt2"], "32-true", 1, PASSES)
    alone |= grid(["single"], ["gpt2"], "bf16-mixed", 1, BF16_ORDERS)
    found |= differences(run(alone, 1), reference, 1)
    two = grid(several, ["gpt2"], "32-true", 2, PASSES) | grid(several, others, "32-true", 2, [1])
    two |= grid(several, ["gpt2"], "bf16-mixed", 2, PASSES)
    found |= differences(run(two, 2), reference, 2)
    four = grid(["hsdp"], ["gpt2"], "32-true", 4, PASSES) | grid(
        ["hsdp"], ["gpt2"], "bf16-mixed", 4, [1]
    )
    found |= differences(run(four, 4), reference, 4)
    report("parity", table(found))


def table(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """One row a strategy: the largest difference of losses and of norms over its splits, a column an experiment."""
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
        for what, num_ranks in columns:
            here = [
                entry
                for key, entry in found.items()
                if key.startswith(f"{name} | {what} | ") and key.endswith(f" | {num_ranks}")
            ]
            largest = [max(entry[key] for entry in here) for key in LOGGED] if here else []
            row[f"{what}, {num_ranks}"] = ", ".join(f"{value:.1e}" for value in largest)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
