"""A run survives failures: bit-for-bit resume after a kill, rollback after a NaN, documented exit codes."""

import math
import signal
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

from gpu_checks.check import Outcome, Settings, judge
from gpu_checks.equality import ONE_OF_EACH, choose_engines
from gpu_checks.rank_cases import describe_missing, make_case, run_cases
from gpu_checks.runs import TINY_GPT2, Finished, run_train
from recipes.checkpoint.manifest import find_fault
from recipes.run_folder import CHECKPOINTS, METRICS_FILE, read_rows
from recipes.runtime.exit_codes import ExitCode

_STEPS, _SAVED, _KILLED = 8, 4, 6
_LIMIT_SECONDS = 120.0  # time limit for one command
_HOST_LIMIT_BYTES = 16 * 2**30  # limit on the address space on a CPU; torch alone needs up to 4 GiB
_COMPUTED = ("train/loss", "grad/norm", "lr", "train/samples")


def resume_after_kill(settings: Settings) -> Outcome:
    """Train 8 steps; then 4, a kill, and the rest with the same command; compare every byte of the train state."""
    model = TINY_GPT2 if settings.is_tiny else ["model=gpt2", "seq_len=256"]
    common = [*model, "data=random_tokens", "precision=bf16-mixed", "global_batch_size=8", "micro_batch_size=4"]
    common += [*settings.on_one_device, f"trainer.max_steps={_STEPS}", f"save_every={_SAVED}", "log_every=1"]
    common += ["eval_samples=4", "callbacks=[grad_norm,loss_spike]", "warmup_steps=2", "trainer.deterministic=true"]
    kill = ["resume=auto", "+callbacks.kill._target_=gpu_checks.callbacks.KillAt"]
    kill += [f"+callbacks.kill.step={_KILLED}", f"+callbacks.kill.after_checkpoint={_SAVED}"]
    straight = run_train(settings, "straight", common, limit_seconds=settings.limit(_LIMIT_SECONDS))
    killed = run_train(settings, "killed", [*common, *kill], limit_seconds=settings.limit(_LIMIT_SECONDS))
    rows_at_kill = len(read_rows(killed.folder / METRICS_FILE))
    resumed = run_train(settings, "killed", [*common, *kill], limit_seconds=settings.limit(_LIMIT_SECONDS))
    failures = [
        f"the {name} run ended with {run.code}, not {code}: {run.output[-800:]}"
        for name, run, code in (
            ("uninterrupted", straight, 0),
            ("killed", killed, -signal.SIGKILL),
            ("resumed", resumed, 0),
        )
        if run.code != code
    ]
    if f"at step {_SAVED}" not in resumed.output:
        failures.append(f"it did not resume at step {_SAVED}: {resumed.output[-800:]}")
    if failures:
        return judge(failures, headline="", figures={})
    hashes = [_hash_state(run) for run in (straight, resumed)]
    rows = [
        [{key: row[key] for key in _COMPUTED} for row in read_rows(run.folder / METRICS_FILE)]
        for run in (straight, resumed)
    ]
    failures += [f"{name}: another hash" for name in sorted(hashes[0]) if hashes[0][name] != hashes[1].get(name)]
    failures += [f"step {n}: {a} became {b}" for n, (a, b) in enumerate(zip(*rows, strict=True), 1) if a != b]
    figures = {"hashes": hashes[0], "losses": [row["train/loss"] for row in rows[0]], "rows_before_kill": rows_at_kill}
    figures["seconds"] = [round(run.seconds, 1) for run in (straight, killed, resumed)]
    return judge(failures, headline="same bits" if not failures else "", figures=figures)


def _hash_state(run: Finished) -> dict[str, str]:
    """Return a hash per tensor file in the last checkpoint: weights, optimizer state, random state.

    Tensors are hashed in name order, because files store them in the order of creation by the optimizer.

    Raises:
        RuntimeError: The checkpoint is missing or damaged.
    """
    folder = run.folder / CHECKPOINTS / f"step_{_STEPS:07d}.ckpt"
    if fault := find_fault(folder):
        raise RuntimeError(f"{folder.name}: {fault}\n{run.output[-800:]}")
    hashes = {}
    for file in sorted(folder.glob("*.safetensors")):
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(load_file(file).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # [bytes]
        hashes[file.name] = digest.hexdigest()
    assert hashes, f"{folder.name} holds no tensors"
    return hashes


def rollback(settings: Settings) -> Outcome:
    """Make one step's loss an outlier: it is skipped, the run rolls back, and the restored state has the same bits."""
    names = ["single", *choose_engines(settings, "rollback", ONE_OF_EACH)]
    steps, fault_after, every = 16, 10, 4
    more = [f"trainer.max_steps={steps}", f"eval_every={steps}", "callbacks=[grad_norm,loss_scale,loss_spike]"]
    more += ["callbacks.loss_spike.max_skips=0", f"callbacks.loss_spike.snapshot_every={every}"]
    more += [f"callbacks.loss_spike.quarantine_steps={every}", "callbacks.loss_spike.snapshot_storage=memory"]
    # ten steps are enough to recognize a loss a thousand times too large
    more += ["callbacks.loss_spike.window=8", "callbacks.loss_spike.warmup_steps=8"]
    more += ["callbacks.loss_spike.loss_threshold=50", "callbacks.loss_spike.drift_threshold=null"]
    cases = {name: make_case(settings, name, *more) | {"fault_after": fault_after} for name in names}
    worker = Path(__file__).with_name("rollback_ranks.py")
    figures: dict[str, Any] = run_cases(settings, "rollback", cases, worker=worker)
    failures = []
    for name, found in figures.items():
        if found["skips"] != [fault_after + 1] or len(found["rollbacks"]) != 1:
            failures.append(f"{name}: skipped steps {found['skips']}, rolled back {found['rollbacks']}")
        failures += [
            f"{name}: after the rollback to step {to_step}, {unequal} of {num_compared} tensors are not as they were"
            for _, to_step, num_compared, unequal in found["restored"]
            if unequal or not num_compared
        ]
        if found["steps"] != steps or not math.isfinite(found["final_loss"]):
            failures.append(f"{name}: ended at step {found['steps']} with loss {found['final_loss']}")
        if found["num_states"] < steps - 2:
            failures.append(f"{name}: {found['num_states']} different states in {steps} steps prove nothing")
    headline = ", ".join(f"{name} {found['rollbacks'][0]}" for name, found in figures.items() if found["rollbacks"])
    return judge(failures, headline=headline, figures=figures, note=describe_missing(ONE_OF_EACH))


def out_of_memory(settings: Settings) -> Outcome:
    """Train with a far too large micro-batch: exit code 71, overrides that suffice by the plan, no traceback."""
    # 26 GB of logits alone on a CPU; hundreds of GB of activations on a GPU
    size = [*TINY_GPT2, "model.vocab_size=50000", "seq_len=16"] if settings.accelerator == "cpu" else ["model=gpt2"]
    micro_batch_size = 8192 if settings.accelerator == "cpu" else 4096
    overrides = [*size, "data=random_tokens", *settings.on_one_device, f"global_batch_size={micro_batch_size}"]
    overrides += [
        "trainer.max_steps=2",
        "save_every=null",
        "eval_samples=1",
        "callbacks=[memory]",
        "loader.num_workers=0",
        "loss_chunk_tokens=null",  # chunked logits would not fill the memory
    ]
    limit_bytes = _HOST_LIMIT_BYTES if settings.accelerator == "cpu" else None
    ended = run_train(settings, "run", overrides, limit_seconds=settings.limit(_LIMIT_SECONDS), limit_bytes=limit_bytes)
    expected = ["Out of memory:", "micro_batch_size=", "activation_checkpoint=full", "mode=plan shows more"]
    failures = [f"the output does not contain {text!r}" for text in expected if text not in ended.output]
    if ended.code != ExitCode.OUT_OF_MEMORY:
        failures.append(f"exit code {ended.code}, not {ExitCode.OUT_OF_MEMORY.value}")
    if "Traceback" in ended.output:
        failures.append("it shows a traceback")
    if not any((ended.folder / "oom").glob("rank_*.txt")):
        failures.append("it left no dump of what filled the memory")
    if failures:
        failures.append(f"its last lines: {ended.output[-800:]}")
    message = next((line for line in ended.output.splitlines() if "Out of memory:" in line), "")
    figures = {"exit_code": ended.code, "seconds": round(ended.seconds, 1), "message": message}
    return judge(failures, headline=f"exit code {ended.code}", figures=figures)
