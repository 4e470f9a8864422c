"""One of two ranks that divide a model and a sequence: writes what each drops, and what gloo exchanges."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from mesh_models import make_batch, make_model, run_backward  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from recipes.checkpoint.rng_state import seed_rank  # noqa: E402
from recipes.mesh import Mesh  # noqa: E402
from recipes.numerics import collectives  # noqa: E402


def find_dropped(mesh: Mesh) -> list[list[list[bool]]]:
    """Return what each dropout of a model has dropped of this rank's tokens, by layer: [B t, W]."""
    model = make_model("gpt2, dropout", mesh)
    dropped: list[Any] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        dropped.append((out == 0).flatten(0, 1).tolist())

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(record)
    seed_rank(seed=0, rank=dist.get_rank(), step=0)  # as a run begins
    run_backward(model, make_batch(), mesh, rank=dist.get_rank())
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
    found = {"tensor": find_dropped(Mesh(tensor=2)), "context": find_dropped(Mesh(context=2)), **exchange()}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"ranks": gathered}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
