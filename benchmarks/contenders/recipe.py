"""`train.py` with all default callbacks and loggers."""

import sys
from pathlib import Path
from typing import Any

from spec import LOG_EVERY, Clock, Spec, read_spec

sys.path.insert(0, str(Path(__file__).parent.parent))

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from lightning.pytorch.callbacks import Callback
from measure import build_run


class _Timer(Callback):
    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_batch_start(self, *args: Any) -> None:
        self.clock.tick()


def list_overrides(spec: Spec) -> list[str]:
    overrides = [
        f"model={spec.family}_nano",
        f"model.vocab_size={spec.vocab_size}",
        f"model.max_seq_len={spec.seq_len}",
        f"model.num_layers={spec.num_layers}",
        f"model.num_heads={spec.num_heads}",
        f"model.hidden_size={spec.hidden_size}",
        "data=token_file",
        f"data.path={spec.tokens}",
        f"seq_len={spec.seq_len}",
        f"global_batch_size={spec.batch}",
        f"precision={'bf16-mixed' if spec.bf16 else '32-true'}",
        f"compile={str(spec.compile).lower()}",
        f"trainer.max_steps={spec.num_steps}",
        f"log_every={LOG_EVERY}",
        f"eval_every={10 * spec.num_steps}",
        "eval_samples=1",
        "save_every=null",
    ]
    if spec.vocab_size < 1000:
        overrides.append("model.vocab_pad_multiple=1")
    if spec.family == "llama":
        overrides += [f"model.num_kv_heads={spec.num_heads}", f"model.ffn_hidden_size={spec.ffn_hidden_size}"]
    return overrides


def main() -> None:
    spec, timer = read_spec(), _Timer()
    run = build_run(list_overrides(spec))
    run.trainer.callbacks.insert(0, timer)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    timer.clock.report(spec)


if __name__ == "__main__":  # the loader's processes import this module
    main()
