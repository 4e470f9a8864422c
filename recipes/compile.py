"""torch.compile block by block: one compilation serves all blocks of a model, some ten seconds on a CPU."""

from torch import nn


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile each block in place.

    All share one code object, so that every shape among them, in training and in evaluation, counts towards its
    limit of compilations; beyond it torch falls back to eager.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 4 * len(blocks))  # type: ignore[attr-defined]
    for block in blocks:
        block.compile(dynamic=False)
