"""One of two ranks that generate with a sharded model, each with another seed: writes the tokens of all ranks."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from one_text import generate  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from recipes.model.gpt2 import GPT2  # noqa: E402


def share_first(value: torch.Tensor) -> torch.Tensor:
    """Return rank 0's tensor, as the strategies do."""
    dist.broadcast(value, src=0)
    return value


def main() -> None:
    """Generate on this rank and gather what both have generated."""
    torch.set_num_threads(1)
    # a rank that stops earlier than the other makes it fail, not hang
    dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    model = GPT2(vocab_size=8, max_seq_len=64, num_layers=1, num_heads=1, hidden_size=8, dropout=0.0)
    model.init_weights(0)
    fully_shard(model.blocks[0])
    fully_shard(model)
    tokens = generate(
        model,
        [1],
        48,
        temperature=1.0,
        top_k=None,
        top_p=None,
        seed=dist.get_rank(),
        ends=[7],
        agree=share_first,
    )
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, tokens)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"tokens": gathered}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
