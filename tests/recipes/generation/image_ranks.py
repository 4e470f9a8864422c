"""One of two ranks that generate different rows with a sharded model that reads images: writes the tokens of both."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from vision_language_cases import NUM_IMAGES, PROMPTS, images_of, model_of, tokens_of  # noqa: E402


def all_ended(ended: bool) -> bool:
    """Return whether the rows of both ranks have ended, as the callbacks do."""
    flag = torch.tensor(int(ended))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def main() -> None:
    """Generate on this rank and gather what both have generated."""
    torch.set_num_threads(1)
    # a rank whose forward passes are others makes the other one fail, not hang
    dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    rank, folder = dist.get_rank(), Path(sys.argv[2]).parent / f"model_{dist.get_rank()}"
    folder.mkdir()
    model = model_of(folder)
    for blocks in model.named_blocks().values():
        for block in blocks:
            fully_shard(block)
    fully_shard(model)
    found: dict[str, Any] = {}
    for use_cache in (True, False):
        # rank 0 has no image and one token; rank 1 reads images, and goes on alone
        prompts, images = PROMPTS[2 * rank : 2 * rank + 2][: 1 + rank], images_of(NUM_IMAGES)
        given = images[2:] if rank else None
        tokens = tokens_of(
            model,
            prompts,
            given,
            use_cache=use_cache,
            is_complete=None if rank else lambda _: True,
            all_ended=all_ended,
        )
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, tokens)
        found["with a cache" if use_cache else "without"] = gathered
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
