"""One of two ranks: what each drops of a divided model, what gloo exchanges, and how a stage ends on new shapes."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402

from recipes.model.gpt2 import GPT2  # noqa: E402
from recipes.numerics import collectives  # noqa: E402
from recipes.parallel.context import apply_context_parallel  # noqa: E402
from recipes.parallel.tensor import apply_tensor_parallel, mark_row_orders  # noqa: E402


def find_dropped(divided: str) -> list[list[list[bool]]]:
    """Return what each dropout of a model has dropped of this rank's tokens, by layer: [B t, W]."""
    group: Any = dist.group.WORLD
    tokens = torch.arange(64).reshape(4, 16) % 50
    with torch.device("meta"):
        model = GPT2(vocab_size=50, max_seq_len=16, num_layers=2, num_heads=4, hidden_size=32, dropout=0.5)
    if divided == "tensor":
        apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence_parallel=True)
    else:
        apply_context_parallel(model, group)
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


def find_signal_of_other_shapes(store: Path) -> int:
    """Return the signal that ends a process whose stage of torch's has rows of a second shape, and then a third.

    It has a process of its own, which ends.
    """
    rank = int(os.environ["RANK"])
    child = os.fork()
    if child == 0:
        files = dist.FileStore(str(store), 2)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
        for num_tokens in (8, 16, 32):
            rows = torch.ones(2, num_tokens, 4)
            run = schedule.step if num_tokens == 8 else schedule.eval
            run(*([rows] if rank == 0 else []), target=rows if rank == 1 else None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)


def main() -> None:
    """Write the results of both ranks."""
    torch.set_num_threads(1)
    signal = find_signal_of_other_shapes(Path(sys.argv[2]).with_name("store"))  # before there are threads
    dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    found = {"tensor": find_dropped("tensor"), "context": find_dropped("context"), "signal": signal, **exchange()}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"ranks": gathered}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
