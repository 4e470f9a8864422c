"""Between logged steps the host reads nothing from the device: it only queues work, and the device never waits."""

from pathlib import Path

import pytest
from host_reads import HostReads
from support import TINY, composed_config, resolved

from recipes.build import build

LOG_EVERY = 5
# on a GPU neither runs: a fused optimizer reads the flag there, and the reader copies beside the computation
ONLY_ON_A_CPU = {"recipes/strategy/__init__.py: skip_step", "callbacks/loss_spike/reader.py: exchange"}


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
    overrides: list[str], tmp_path: Path, text_folder: str
) -> None:
    common = [*TINY, f"data.path={text_folder}", "trainer.max_steps=15", f"log_every={LOG_EVERY}", "eval_every=15"]
    run = build(resolved(composed_config(*common, "save_every=null", "warmup_steps=1", *overrides), tmp_path))
    reads = HostReads(log_every=LOG_EVERY)
    run.trainer.callbacks.insert(0, reads)  # type: ignore[attr-defined]
    with reads.counting():
        run.trainer.fit(run.task, datamodule=run.data)
    assert reads.num_logged > 4, "the rows are read there: else nothing is counted"
    assert {*reads.places} <= ONLY_ON_A_CPU
