"""Convert the parameters of a finished model to the dtype that an export has, and find that of published weights."""

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from recipes.errors import ConfigError
from recipes.model.weights.files import open_file, open_weights, published_folder

log = logging.getLogger("lightning_recipes")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_dtype(published: str) -> torch.dtype | None:
    """Return the dtype in which most values of a published model are stored; None if it is no longer there.

    Its files decide, not its config.json, which may say something else. Of safetensors, headers alone are read.

    Args:
        published: Folder, file or hub name.

    Raises:
        ConfigError: Its files cannot be read.
    """
    file = Path(os.path.expanduser(published))
    folder = None if file.is_file() else published_folder(published)
    if folder is None and not file.is_file():
        log.info("%s is gone: the export has the dtype of the run; mode.dtype=<dtype> chooses another one", published)
        return None
    sizes: Counter[torch.dtype] = Counter()
    with open_file(file, f"model.pretrained={file}") if folder is None else open_weights(folder) as weights:
        for name in weights.names():
            dtype, num_values = weights.describe(name)
            if dtype is not None and dtype in DTYPES.values():
                sizes[dtype] += num_values
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


@torch.no_grad()
def convert_parameters(
    model: nn.Module, dtype: torch.dtype, *, setting: str, only: Callable[[str], bool] = lambda name: True
) -> None:
    """Convert floating-point parameters in place, tied ones once; buffers keep their dtype.

    Running statistics and tables of angles are buffers: they are small, and rounded they would change every output.

    Args:
        model: Unsharded model without quantized weights.
        dtype: Floating-point dtype.
        setting: The override that chose it, `key=value`.
        only: Whether a parameter of this name is converted.

    Raises:
        ConfigError: A finite value is infinite in this dtype; parameters before it have been converted.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype == dtype or not only(name):
            continue
        converted = parameter.to(dtype)
        new = converted.isinf() & parameter.isfinite()
        if bool(new.any()):
            largest = parameter[new].abs().max().item()
            shown = str(dtype).removeprefix("torch.")
            reason = f"{name} holds {largest:.6g}, and the largest number of {shown} is {torch.finfo(dtype).max:.6g}"
            raise ConfigError(setting, reason, f"mode.dtype={'float32' if shown == 'bfloat16' else 'bfloat16'}")
        parameter.data = converted
