"""The three float32 matmuls of a linear layer with MKL and oneDNN, in turns, on one thread and on all threads.

Rows of other processors stay in the results.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import RESULTS, report
from torch import Tensor

from recipes.numerics import linear as module
from recipes.numerics.linear import linear, weight_gradient

ROUNDS = 20
# rows, input features, output features
SHAPES = {
    "GPT-2 4 x 128, MLP": (768, 128, 512),
    "GPT-2 124M, QKV": (1024, 768, 2304),
    "GPT-2 124M, MLP up": (1024, 768, 3072),
    "GPT-2 124M, MLP down": (1024, 3072, 768),
    "GPT-2 124M, head": (1024, 768, 50304),
}


def measure(product: Callable[[], Tensor], num_rounds: int) -> list[float]:
    """Return the median seconds with MKL and with oneDNN."""
    seconds: list[list[float]] = [[], []]
    for _ in range(num_rounds + 1):
        for enabled in (False, True):
            with torch.backends.mkldnn.flags(enabled=enabled):
                began = time.perf_counter()
                product()
                seconds[enabled].append(time.perf_counter() - began)
    return [statistics.median(each[1:]) for each in seconds]


def main() -> None:
    rows: list[dict[str, Any]] = []
    all_threads = torch.get_num_threads()
    processor = torch.cpu.get_capabilities()["cpu_name"]
    used = "oneDNN" if module.ONEDNN_IS_FASTER else "MKL"
    module.ONEDNN_IS_FASTER = True  # so that `mkldnn.flags` chooses
    for num_threads in (1, all_threads):
        torch.set_num_threads(num_threads)
        for name, (num_rows, num_inputs, num_outputs) in SHAPES.items():
            x, grad = torch.randn(num_rows, num_inputs), torch.randn(num_rows, num_outputs)
            weight = torch.randn(num_outputs, num_inputs)
            products: dict[str, Callable[[], Tensor]] = {
                "output": lambda x=x, weight=weight: linear(x, weight),
                "gradient of the input": lambda grad=grad, weight=weight: linear(grad, weight.T),
                "of the weight": lambda grad=grad, x=x: weight_gradient(grad, x),
            }
            row: dict[str, Any] = {"processor": processor, "layer": name, "threads": num_threads}
            flops = 2 * num_rows * num_inputs * num_outputs
            for kind, product in products.items():
                mkl, onednn = measure(product, ROUNDS if num_outputs < 10_000 else 3)
                row[f"{kind}, GFLOP/s"] = f"{flops / mkl / 1e9:.0f} -> {flops / onednn / 1e9:.0f}"
            rows.append(row | {"used": used})
    torch.set_num_threads(all_threads)
    before = json.loads((RESULTS / "linear.json").read_text(encoding="utf-8"))["rows"]
    report("linear", [*(row for row in before if row["processor"] != processor), *rows])


if __name__ == "__main__":
    main()
