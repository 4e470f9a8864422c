"""Train with zclip, EMA and regularizers enabled, as one rank: python switch_ranks.py <cases.json> <results.json>.

The result is the metric rows, some weights and their EMA in the last checkpoint, and the same for a run resumed from
the middle checkpoint.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.checkpoint.layout import is_shard  # noqa: E402
from recipes.checkpoint.saved_tensor import open_tensors  # noqa: E402


def train(case: dict[str, Any], folder: Path, *more: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    config = composed_config(*case["overrides"], *more) | {"data": case["data"]}
    run = build(resolved(config, folder))
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    if not run.trainer.is_global_zero:
        return {}
    files = [file for file in (folder / "checkpoints/last").iterdir() if is_shard(file.name)]
    tensors = open_tensors(files)
    name = next(key for key in tensors if key.startswith("model.blocks.1") and len(tensors[key].shape) == 2)
    return {
        "rows": read_metrics(folder),
        "weights": tensors[name].read().flatten()[:50].tolist(),
        "average": tensors[f"optimizer/ema/{name}"].read().flatten()[:50].tolist(),
    }


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    uninterrupted = train(case, folder / "uninterrupted")
    resumed = train(case, folder / "resumed", f"resume={folder}/uninterrupted/checkpoints/step_{case['half']:07d}.ckpt")
    return uninterrupted | {f"resumed {name}": value for name, value in resumed.items()}


if __name__ == "__main__":
    run_all(run_case)
