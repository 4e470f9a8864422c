"""torch.compile per block: all blocks of a model share one compilation, which takes about ten seconds on a CPU."""

from torch import nn


def compile_blocks(blocks: nn.ModuleList, *, mode: str) -> None:
    """Compile each block in place.

    Args:
        blocks: Modules of the same class.
        mode: `mode` of `torch.compile`.
    """
    from torch._dynamo import config

    # DDPOptimizer would split blocks at bucket boundaries; per-block graphs already overlap the all-reduce
    config.optimize_ddp = False  # type: ignore[attr-defined]

    # the blocks share one code object: every shape of any block, in training and evaluation, counts toward its
    # recompile limit, beyond which torch falls back to eager
    config.recompile_limit = max(config.recompile_limit, 4 * len(blocks))  # type: ignore[attr-defined]
    for block in blocks:
        block.compile(dynamic=False, mode=mode)
