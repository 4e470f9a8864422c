"""Count reads of tensors by the host, which make it wait for the device, between logged steps and by place.

Counts the methods in `READS`, not other operators that wait, such as indexing by a mask.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

# what makes the host wait for the result of a kernel
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
ROOT = Path(__file__).parents[1]


class HostReads(Callback):
    """Counts by place what reads a tensor on the host in steps that are not logged, from the second on.

    The first step sets up what later ones reuse, such as the first snapshot for a rollback.

    Args:
        log_every: Steps between two rows.
    """

    def __init__(self, *, log_every: int) -> None:
        self.log_every = log_every
        self.places: Counter[str] = Counter()
        self.num_logged = 0
        self._step: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step + 1 if trainer.global_step else None

    def on_validation_start(self, *arguments: Any) -> None:
        self._step = None

    def on_train_end(self, *arguments: Any) -> None:
        self._step = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count every read of a tensor within the block."""
        originals = {name: getattr(torch.Tensor, name) for name in READS}

        def count(name: str) -> Any:
            def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
                self._add()
                return originals[name](tensor, *arguments, **options)

            return read

        for name in READS:
            setattr(torch.Tensor, name, count(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch.Tensor, name, original)

    def _add(self) -> None:
        if self._step is None:
            return
        if self._step % self.log_every == 0:
            self.num_logged += 1
            return
        code = sys._getframe(2).f_code
        file = Path(code.co_filename)
        if "site-packages" in file.parts:
            place = "/".join(file.parts[file.parts.index("site-packages") + 1 :])
        else:
            place = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
        self.places[f"{place}: {code.co_name}"] += 1
