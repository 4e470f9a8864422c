"""Numbers outside the range in which they mean something."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.errors import ConfigError

# dotted key: (lowest, highest, may the bounds themselves be taken, what the number is)
_RANGES: dict[str, tuple[float, float, bool, str]] = {
    "seed": (0, 2**32 - 1, True, "a seed"),
    "global_batch_size": (1, float("inf"), True, "a number of samples"),
    "micro_batch_size": (1, float("inf"), True, "a number of samples"),
    "seq_len": (1, float("inf"), True, "a number of tokens"),
    "log_every": (1, float("inf"), True, "a number of optimizer steps"),
    "eval_every": (1, float("inf"), True, "a number of optimizer steps"),
    "save_every": (1, float("inf"), True, "a number of optimizer steps"),
    "loader.overfit_batches": (1, float("inf"), True, "a number of global batches"),
    "eval_samples": (1, float("inf"), True, "a number of samples"),
    "trainer.max_steps": (1, float("inf"), True, "a number of optimizer steps"),
    "launcher.max_jobs": (1, float("inf"), True, "a number of jobs"),
    "launcher.devices_per_job": (1, float("inf"), True, "a number of devices"),
    "trainer.num_nodes": (1, float("inf"), True, "a number of nodes"),
    "trainer.accumulate_grad_batches": (1, float("inf"), True, "a number of micro-batches"),
    "trainer.gradient_clip_val": (0, float("inf"), False, "a gradient norm"),
    "strategy.shard_size": (1, float("inf"), True, "a number of ranks"),
    "optimizer.lr": (0, float("inf"), False, "a learning rate"),
    "optimizer.eps": (0, float("inf"), False, "an epsilon"),
    "optimizer.weight_decay": (0, float("inf"), True, "a weight decay"),
    "optimizer.momentum": (0, 1, True, "a momentum"),
    "scheduler.final_fraction": (0, 1, True, "a fraction"),
    "scheduler.start_fraction": (0, 1, True, "a fraction"),
    "scheduler.warmup_fraction": (0, 1, True, "a fraction"),
    "scheduler.warmup_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "scheduler.decay_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "scheduler.cooldown_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "model.num_layers": (1, float("inf"), True, "a number of blocks"),
    "model.num_heads": (1, float("inf"), True, "a number of heads"),
    "model.num_kv_heads": (1, float("inf"), True, "a number of heads"),
    "model.hidden_size": (1, float("inf"), True, "a hidden_size"),
    "model.ffn_hidden_size": (1, float("inf"), True, "a hidden_size"),
    "model.vocab_size": (2, float("inf"), True, "a number of tokens"),
    "model.max_seq_len": (1, float("inf"), True, "a number of tokens"),
    "model.vocab_pad_multiple": (1, float("inf"), True, "a multiple"),
    "model.num_classes": (2, float("inf"), True, "a number of classes"),
    "model.in_channels": (1, float("inf"), True, "a number of channels"),
    "warmup_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "tokenizer.vocab_size": (257, float("inf"), True, "a vocabulary of all bytes and more"),
    "activation_checkpoint.every_nth_block": (0, float("inf"), True, "a number of blocks"),
    "callbacks.progress.refresh_per_second": (0, float("inf"), False, "a rate"),
    "callbacks.sample_text.num_tokens": (1, float("inf"), True, "a number of tokens"),
    "callbacks.sample_text.temperature": (0, float("inf"), True, "a temperature"),
    "callbacks.sample_text.top_k": (1, float("inf"), True, "a number of tokens"),
    "callbacks.sample_text.top_p": (0.001, 1, True, "a probability"),
    "callbacks.sample_text.every_n_steps": (1, float("inf"), True, "a number of optimizer steps"),
    "ema_decay": (0, 1, False, "a share of the average that stays"),
    "label_smoothing": (0, 0.999, True, "a probability"),
    "z_loss": (0, float("inf"), True, "a weight"),
    "profile": (1, float("inf"), True, "a number of optimizer steps"),
    "callbacks.throughput.peak_tflops": (0, float("inf"), False, "a rate"),
    "callbacks.early_stop.patience": (1, float("inf"), True, "a number of validations"),
    "clipping.decay": (0, 1, False, "a share of the average that stays"),
    "clipping.z_score": (0, float("inf"), False, "a number of standard deviations"),
    "clipping.quantile": (0, 1, False, "a fraction"),
    "clipping.window": (2, float("inf"), True, "a number of norms"),
    "clipping.warmup_steps": (1, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.window": (2, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.warmup_steps": (2, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.loss_threshold": (0, float("inf"), False, "a number of deviations"),
    "callbacks.loss_spike.norm_threshold": (0, float("inf"), False, "a number of deviations"),
    "callbacks.loss_spike.drift_threshold": (0, float("inf"), False, "a number of deviations"),
    "callbacks.loss_spike.max_skips": (0, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.snapshot_every": (
        1,
        float("inf"),
        True,
        "a number of optimizer steps",
    ),
    "callbacks.loss_spike.num_snapshots": (2, float("inf"), True, "a number of snapshots"),
    "callbacks.loss_spike.quarantine_steps": (1, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.skip_batches": (0, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.cooldown_steps": (1, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.lr_factor": (0, 1, False, "a factor"),
    "callbacks.loss_spike.lr_backoff_steps": (1, float("inf"), True, "a number of steps"),
    "callbacks.loss_spike.max_rollbacks": (1, float("inf"), True, "a number of rollbacks"),
    "callbacks.loss_spike.max_dumps": (0, float("inf"), True, "a number of folders"),
    "model.dropout": (0, 0.999, True, "a probability"),
    "data.val_fraction": (0, 0.9, False, "a fraction"),
    "save_every_minutes": (0, float("inf"), False, "a number of minutes"),
    "checkpoint.keep_last": (1, float("inf"), True, "a number of checkpoints"),
    "checkpoint.keep_every": (1, float("inf"), True, "a number of optimizer steps"),
    "checkpoint.keep_best": (0, float("inf"), True, "a number of checkpoints"),
    "loader.num_workers": (0, float("inf"), True, "a number of processes"),
    "mode.temperature": (0, float("inf"), True, "a temperature"),
    "mode.top_k": (1, float("inf"), True, "a number of tokens"),
    "mode.top_p": (0.001, 1, True, "a probability"),
    "mode.num_tokens": (1, float("inf"), True, "a number of tokens"),
    "mode.num_samples": (1, float("inf"), True, "a number of texts"),
}


def check_ranges(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Every number of the table that the config holds."""
    for key, (lowest, highest, closed, what) in _RANGES.items():
        value = _lookup(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        inside = lowest <= value <= highest if closed else lowest < value < highest
        if not inside:
            bounds = _describe(lowest, highest, closed=closed)
            yield ConfigError(f"{key}={value}", f"{what} is {bounds}", f"{key}=<{bounds}>")
    betas = _lookup(config, "optimizer.betas")
    if not isinstance(betas, list) or not all(isinstance(beta, int | float) for beta in betas):
        return  # none, or another check's mistake
    if len(betas) != 2:
        yield ConfigError(
            f"optimizer.betas={betas}", "Adam has two decay rates", "'optimizer.betas=[0.9,0.95]'"
        )
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            yield ConfigError(
                f"optimizer.betas[{index}]={beta}",
                "a decay rate is from 0 to below 1",
                "'optimizer.betas=[0.9,0.95]'",
            )


def _describe(lowest: float, highest: float, *, closed: bool) -> str:
    if highest == float("inf"):
        return f"at least {lowest:.10g}" if closed else f"above {lowest:.10g}"
    return (
        f"from {lowest:.10g} to {highest:.10g}"
        if closed
        else f"above {lowest:.10g} and below {highest:.10g}"
    )


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node
