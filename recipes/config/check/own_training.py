"""Check a run whose LightningModule, LightningDataModule or both are one's own: what a run cannot do for them."""

from collections.abc import Iterator

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError

# settings of a training that a LightningModule decides itself
_OF_MODULE = (
    *(
        "model",
        "loss",
        "optimizer",
        "scheduler",
        "metrics",
        "clipping",
        "adapter",
        "activation_checkpoint",
        "lr_scaling",
    ),
    *("freeze", "ema_decay", "label_smoothing", "z_loss", "loss_chunk_tokens", "warmup_steps", "start_from"),
)
_OF_MODELS = ("evaluator", "reward")
_OF_LOADERS = ("global_batch_size", "micro_batch_size", "eval_samples", "eval_data", "loader")
_SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "expert_parallel_size")


def check_own_training(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the settings of a run with a LightningModule of one's own, or loaders of one's own."""
    if not run.task.has_own_training:
        if run.has_own_loaders:
            yield ConfigError(
                "data=lightning",
                "its batches are for a LightningModule, and the task takes those of our data",
                "task=lightning 'task.module={_target_: <module.Class>}', or data=dataset with its Datasets",
            )
        return
    typed = [(text, text.lstrip("+~").partition("=")[0].partition("@")[0]) for text in run.typed]
    for override, key in typed:
        if key.partition(".")[0] in _OF_MODULE and override != "model=of_module":
            reason = "with task=lightning the module has its own, so it has no effect"
            yield ConfigError(override, reason, f"the same command without {key}, or an argument of task.module")
        elif run.has_own_loaders and key.partition(".")[0] in _OF_LOADERS:
            reason = "the loaders of data.module decide what a batch is, so it has no effect"
            fix = "an argument of data.module, or trainer.accumulate_grad_batches=<batches of a step>"
            yield ConfigError(override, reason, fix)
        elif key.partition(".")[0] in _OF_MODELS or override == "mode.weights=ema":
            reason = "it is for models of ours; a LightningModule is asked by its own steps, with the trained weights"
            yield ConfigError(override, reason, f"the same command without {key}")
    mode = run.mode
    asks_model = mode.takes_steps or mode.plans_steps or mode.needs_checkpoint or mode.reads_logits
    takes_it = mode.trains or mode.takes_own_training or mode.needs in run.task.supports
    if asks_model and not takes_it:
        reason = "it asks the model and the loss, which a LightningModule keeps to itself"
        yield ConfigError(f"mode={mode.name} task=lightning", reason, "mode=fit")
    for key in _SIZES:
        if run.config.get(key, 1) != 1:
            reason = "only models of ours know how to divide their layers"
            yield ConfigError(
                f"{key}={run.config[key]} task=lightning", reason, f"{key}=1, with strategy=fsdp for memory"
            )
    if run.strategy.stage == 3 or run.strategy.offload_optimizer is not None:
        reason = "the module constructs its weights and its optimizer itself, whole"
        yield ConfigError(
            f"{run.strategy.typed} task=lightning", reason, "strategy=fsdp, or strategy=deepspeed_stage_2"
        )
    if run.precision in ("bf16-true", "fp8-mixed"):
        reason = "it converts the weights of a model that has no storage yet, and the module's have"
        yield ConfigError(f"precision={run.precision} task=lightning", reason, "precision=bf16-mixed")
