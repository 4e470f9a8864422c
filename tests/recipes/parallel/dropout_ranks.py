"""One of two ranks that divide a model and a sequence: writes what each drops, and what gloo exchanges."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from recipes.model.gpt2 import GPT2  # noqa: E402
from recipes.numerics import collectives  # noqa: E402
from recipes.parallel.context import divide_sequences  # noqa: E402
from recipes.parallel.tensor import divide_tensors, mark_row_orders  # noqa: E402


def find_dropped(divided: str) -> list[list[list[bool]]]:
    """Return what each dropout of a model has dropped of this rank's tokens, by layer: [B t, W]."""
    group: Any = dist.group.WORLD
    tokens = torch.arange(64).reshape(4, 16) % 50
    with torch.device("meta"):
        model = GPT2(vocab_size=50, max_seq_len=16, num_layers=2, num_heads=4, hidden_size=32, dropout=0.5)
    if divided == "tensor":
        divide_tensors(model, init_device_mesh("cpu", (2,)), sequence_parallel=True)
    else:
        divide_sequences(model, group)
        tokens = tokens.chunk(2, dim=1)[group.rank()]
    model.to_empty(device="cpu")
    mark_row_orders(model)
    model.init_weights(0)
    dropped: list[Any] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        dropped.append((out == 0).flatten(0, 1).tolist())

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(record)
    torch.manual_seed(dist.get_rank())  # another one on each rank, as `seed_rank` of a run
    model(tokens)
    return dropped


def exchange() -> dict[str, Any]:
    """Return what collectives give on real ranks."""
    group: Any = dist.group.WORLD
    x = torch.arange(8.0).reshape(2, 4) + 100 * dist.get_rank()
    largest = collectives.reduce_parts(x, group, reduction="max")
    return {
        "gathered": collectives.gather_parts(x, group, dim=1).tolist(),
        "scattered": collectives.scatter_sum(x, group, dim=1).tolist(),
        "exchanged": collectives.exchange_parts(x, group, split=1, concat=0).tolist(),
        "largest": largest.tolist(),
    }


def main() -> None:
    """Write the results of both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    found = {"tensor": find_dropped("tensor"), "context": find_dropped("context"), **exchange()}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"ranks": gathered}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
