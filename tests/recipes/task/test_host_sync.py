"""Between logged steps the host reads nothing from the device: it only queues work, and the device never waits."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support import TINY, composed_config

from recipes.build import build

# what makes the host wait for the result of a kernel
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
LOG_EVERY = 5
# on a GPU neither runs: a fused optimizer reads the flag there, and the reader copies beside the computation
ONLY_ON_A_CPU = {"recipes/strategy/__init__.py: skip_step", "callbacks/loss_spike/reader.py: exchange"}
ROOT = Path(__file__).parents[3]


class Reads(Callback):
    """Counts by place what reads a tensor on the host, from the first step on and outside of logged steps."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self.num_logged = 0
        self._step: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step + 1

    def on_validation_start(self, *arguments: Any) -> None:
        self._step = None

    def on_train_end(self, *arguments: Any) -> None:
        self._step = None

    def add(self) -> None:
        if self._step is None:
            return
        if self._step % LOG_EVERY == 0:
            self.num_logged += 1
            return
        code = sys._getframe(2).f_code
        file = Path(code.co_filename)
        place = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
        self.places[f"{place}: {code.co_name}"] += 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    counter = Reads()

    def counted(name: str) -> Any:
        inner = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            counter.add()
            return inner(self, *arguments, **options)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    return counter


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.gradient_clip_val=0.5", "clipping=zclip", "ema_decay=0.99", "z_loss=1e-4", "micro_batch_size=2"],
        ["loss_chunk_tokens=null", "precision=bf16-mixed", "label_smoothing=0.1"],
        ["activation_checkpoint=selective", "precision=bf16-mixed"],
    ],
    ids=["default", "clipping, average and accumulation", "all logits", "selective recomputation"],
)
def test_the_host_reads_the_device_on_logged_steps_alone(
    overrides: list[str], reads: Reads, tmp_path: Path, text_folder: str
) -> None:
    common = [*TINY, f"data.path={text_folder}", "trainer.max_steps=15", f"log_every={LOG_EVERY}", "eval_every=15"]
    run = build(composed_config(*common, "save_every=null", "warmup_steps=1", *overrides), tmp_path, [])
    run.trainer.callbacks.insert(0, reads)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    assert reads.num_logged > 4, "the rows are read there: else nothing is counted"
    snapshot = {f"recipes/clipping/zclip.py: {name}" for name in ("state_dict", "<listcomp>")}  # of the first weights
    assert {*reads.places} - ONLY_ON_A_CPU <= snapshot
