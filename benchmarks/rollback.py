"""Cost of a snapshot and a rollback under every engine, and the callback's overhead per step.

GPT-2 with 124 million parameters on one rank, or a quarter of that on two; AdamW, and sequences of 16 tokens to keep
steps short. Then `gpt2_nano` with defaults: time in all hooks of the callback, including a snapshot every 50 steps.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "tests/parity"),
    str(ROOT / "benchmarks"),
]

COMMON = [
    "data=random_tokens",
    "tokenizer=none",
    "eval_samples=4",
    "save_every=null",
    "log_every=1",
    "trainer.accelerator=cpu",
    "callbacks=[grad_norm]",
]
FULL = ["model=gpt2", "model.max_seq_len=16", "global_batch_size=2"]
QUARTER = [*FULL, "model.hidden_size=384", "model.num_heads=6", "model.vocab_size=25000"]
ENGINES = {
    1: ["single"],
    2: ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"],
}
STEPS, NANO_STEPS = 9, 200
HOOKS = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "after_row",
)


def main() -> None:
    from measure import report
    from ranks import run_on_ranks

    rows = []
    for world_size, engines in ENGINES.items():
        cases = {}
        for engine in engines:
            overrides = [*COMMON, *(FULL if world_size == 1 else QUARTER), f"strategy={engine}"]
            overrides += [f"trainer.devices={world_size}", f"trainer.max_steps={STEPS}"]
            cases[engine] = {"overrides": [*overrides, f"eval_every={STEPS}"], "every": 1}
        nano = ["model=gpt2_nano", "seq_len=64", "global_batch_size=4", "strategy=ddp"]
        nano = nano if world_size > 1 else [*nano[:-1], "strategy=single"]
        more = [f"trainer.devices={world_size}", f"trainer.max_steps={NANO_STEPS}"]
        overrides = [*COMMON, *nano, *more, f"eval_every={NANO_STEPS}"]
        cases["nano"] = {"overrides": overrides, "every": 50}
        folder = Path(tempfile.mkdtemp(prefix="rollback_"))
        found = run_on_ranks(
            cases,
            world_size=world_size,
            folder=folder,
            worker=Path(__file__),
            timeout_seconds=3600.0,
        )
        rows += [_row(name, world_size, result) for name, result in found.items()]
    report("rollback", rows)


def _row(name: str, world_size: int, result: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in result, result["error"]
    millions = result["num_parameters"] / 1e6
    return {
        "engine": name if name != "nano" else "gpt2_nano, defaults",
        "ranks": world_size,
        "parameters": f"{millions:.1f} M",
        "bytes a parameter and rank": f"{result['num_bytes'] / result['num_parameters']:.1f}",
        "snapshot ms": f"{1000 * statistics.median(result['snapshots'][1:]):.1f}",
        "rollback ms": f"{1000 * statistics.median(result['rollbacks']):.0f}",
        "hooks ms a step": f"{1000 * result['hooks']:.2f}" if name == "nano" else "",
        "of a 200 ms step": f"{100 * result['hooks'] / 0.2:.2f} %" if name == "nano" else "",
    }


def _time_hooks(spikes: Any) -> list[float]:
    """Return a list whose only element accumulates the seconds spent in all hooks of the callback from now on."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for hook in HOOKS:
        setattr(spikes, hook, timed(getattr(spikes, hook)))
    return spent


def _time_snapshots(spikes: Any) -> list[float]:
    """Return a list that collects the seconds of each snapshot from now on."""
    snapshots: list[float] = []
    take = spikes._recovery.rollback.take

    def timed_take(*args: Any, **kwargs: Any) -> None:
        take(*args, **kwargs)
        snapshots.append(spikes._recovery.rollback.seconds)

    spikes._recovery.rollback.take = timed_take
    return snapshots


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with snapshots, and roll back three times after the last step."""
    import torch
    from lightning.pytorch.callbacks import Callback
    from support import composed_config, resolved

    from callbacks import LossSpikeRollback
    from recipes.build import build
    from recipes.model.init import unsharded_shape

    run = build(resolved(composed_config(*case["overrides"]), folder))
    every = case["every"]
    spikes = LossSpikeRollback(
        action="rollback", snapshot_every=every, quarantine_steps=every, snapshot_storage="memory"
    )
    rollbacks: list[float] = []
    spent = _time_hooks(spikes)
    snapshots = _time_snapshots(spikes)

    class RollBack(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            rollback = spikes._recovery.rollback
            for _ in range(3):
                trainer.strategy.barrier()
                began = time.perf_counter()
                snapshot = rollback.find(clock=10**9, oldest=False)
                assert snapshot is not None
                rollback.restore(trainer, snapshot, with_random=True)
                rollbacks.append(time.perf_counter() - began)

    run.trainer.callbacks[1:1] = [RollBack(), spikes]  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    steps = run.trainer.max_steps
    result = {
        "snapshots": snapshots,
        "rollbacks": rollbacks,
        "num_bytes": spikes._recovery.rollback.num_bytes,
        "num_parameters": sum(unsharded_shape(weight).numel() for weight in run.task.parameters()),
        "hooks": spent[0] / steps,
    }
    assert torch.tensor(rollbacks).isfinite().all()
    return result


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        from run_cases import run_all

        run_all(run_case)
