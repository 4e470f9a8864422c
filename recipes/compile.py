"""torch.compile block by block: one compilation serves all blocks of a model, about ten seconds on a CPU."""

from torch import nn


def compile_blocks(blocks: nn.ModuleList, *, mode: str) -> None:
    """Compile each block in place.

    Args:
        blocks: Modules of the same class.
        mode: Of `torch.compile`.
    """
    from torch._dynamo import config

    # it would split a block where a bucket of DDP ends; block by block, gradients are reduced early enough
    config.optimize_ddp = False  # type: ignore[attr-defined]

    # the blocks share one code object: every shape of any block, in training and evaluation, counts towards its limit,
    # beyond which torch falls back to eager
    config.recompile_limit = max(config.recompile_limit, 4 * len(blocks))  # type: ignore[attr-defined]
    for block in blocks:
        block.compile(dynamic=False, mode=mode)
