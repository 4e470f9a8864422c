"""Materialize one model on one rank and measure its host memory: python place_model.py <cases> <results>."""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from support import composed_config, resolved  # noqa: E402

from recipes.build import build  # noqa: E402


def resident_bytes() -> int:
    """Return the resident set size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    torch.set_num_threads(1)
    [(name, case)] = json.loads(Path(sys.argv[1]).read_text()).items()
    run = build(resolved(composed_config(*case["overrides"]), Path(tempfile.mkdtemp())))
    materialize = run.trainer.strategy.materialize  # type: ignore[attr-defined]

    def measured(model: torch.nn.Module, initialize: object) -> None:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        before = most = resident_bytes()
        placed = threading.Event()

        def watch() -> None:
            nonlocal most
            while not placed.wait(0.002):
                most = max(most, resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        materialize(model, initialize)
        placed.set()
        watcher.join()
        taken = max(most, resident_bytes()) - before
        if os.environ["RANK"] == "0":
            result = {"num_parameters": num_parameters, "taken_bytes": taken}
            Path(sys.argv[2]).write_text(json.dumps({name: result}))
        time.sleep(0.5)  # the other rank may still be materializing
        os._exit(0)

    run.trainer.strategy.materialize = measured  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)


if __name__ == "__main__":
    main()
