"""Check how a step is divided: ranks, global batch, mesh, pipeline stages and experts; each against the model."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recipes.config.ranks import MODEL_SIZES
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature, read_signature
from recipes.errors import ConfigError
from recipes.mesh import STAGES_PER_RANK, least_micro_batches
from recipes.numerics.expert_shape import ALIGNMENT, find_wrong_experts, find_wrong_latent_heads


def check_ranks(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the devices and nodes against the existing ranks and this machine.

    Imports torch only on a machine with a GPU that several ranks may use.
    """
    devices = run.devices
    if not _is_valid(devices):
        shown = str(devices).replace(" ", "")
        reason = "it takes a positive number, a list of GPUs, or auto"
        if isinstance(devices, str) and re.fullmatch(r"-?[0-9]+|\[.*\]", shown):
            setting, reason = f"trainer.devices='{shown}'", f"{reason}, and in quotes it is text"
            yield ConfigError(setting, reason, f"trainer.devices={'auto' if _is_none(shown) else shown}")
            return
        yield ConfigError(f"trainer.devices={shown}", reason, "trainer.devices=auto")
    elif run.num_nodes >= 1:  # else reported by the check of ranges
        yield from _find_mistake(lambda: run.ranks)


def _is_none(number: str) -> bool:
    return re.fullmatch(r"0+|-([02-9]|1[0-9]).*", number) is not None


def _is_valid(devices: object) -> bool:
    if isinstance(devices, list):
        return bool(devices) and len(set(devices)) == len(devices) and min(devices) >= 0
    return devices in ("auto", -1) or (isinstance(devices, int) and devices > 0)


def _find_mistake(derive: Callable[[], object]) -> Iterator[ConfigError]:
    """Yield the error that deriving a part of the run raises."""
    try:
        derive()
    except ConfigError as mistake:
        yield mistake


def check_batch_size(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check the global batch against micro-batches and ranks, and the sequence length against the model.

    Args:
        run: Composed run whose nodes match their signatures.
        has_ranks: Whether its number of ranks is valid, else that is reported separately.
    """
    counts = (run.global_batch_size, run.micro_batch_size, run.accumulate_grad_batches)
    # 0 is out of range and reported by that check
    if has_ranks and all(count is None or count > 0 for count in counts):
        wrong = [_name_micro_batch(run, mistake) for mistake in _find_mistake(lambda: run.accumulation)]
        yield from wrong or _check_batch_norm(run)
    yield from _check_frozen_norm(run)
    max_seq_len = run.config["model"].get("max_seq_len")
    data_seq_len = run.config["data"].get("seq_len")
    if max_seq_len is not None and data_seq_len is not None and data_seq_len > max_seq_len:
        yield ConfigError(
            f"seq_len={data_seq_len}",
            f"the model accepts at most model.max_seq_len={max_seq_len} tokens",
            f"seq_len={max_seq_len}",
        )


def _name_micro_batch(run: ResolvedRun, mistake: ConfigError) -> ConfigError:
    """Return the error of a global batch that its micro-batches do not divide, as one of what was typed."""
    larger, _, smaller = mistake.fix.partition(", or ")
    typed = [override.lstrip("+").partition("=")[0] for override in run.typed]
    if not smaller or "micro_batch_size" not in typed or "global_batch_size" in typed:
        return mistake
    return ConfigError(f"micro_batch_size={run.micro_batch_size}", mistake.reason, f"{smaller}, or {larger}")


def _check_batch_norm(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that batch norm has more than one value per channel, without which torch raises an error in training."""
    model, data = run.config["model"], run.config["data"]
    stride = find_signature(model["_target_"]).constants.get("batch_norm_stride")
    size = data.get("image_size", find_signature(data["_target_"]).constants.get("image_size"))
    if not run.mode.takes_steps or not isinstance(stride, int) or not isinstance(size, int):
        return
    pixels = stride if model.get("small_images") else 4 * stride
    norm = model.get("norm", "batch")
    is_synced = norm in ("group", "frozen") or (norm == "sync" and run.ranks.world_size > 1)
    if run.accumulation.micro_batch_size == 1 and size <= pixels and not is_synced:
        smallest = 2 * run.num_data_ranks
        batch = "" if run.global_batch_size % smallest == 0 else f" global_batch_size={smallest}"
        yield ConfigError(
            "micro_batch_size=1" if run.micro_batch_size else f"global_batch_size={run.global_batch_size}",
            f"one image of {size} x {size} leaves batch norm a single value per channel, which has no variance",
            f"micro_batch_size=2{batch}",
        )


def _check_frozen_norm(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that statistics that stay as they are come from somewhere."""
    model = run.config["model"]
    declared: Any = find_signature(model["_target_"]).constants.get("free_at_resume", ())
    begins_anew = run.mode.trains and run.start_from is None and run.resume in (None, "auto")
    key = "image_pretrained" if "image_pretrained" in model else "pretrained"
    if "norm" in declared and model.get("norm") == "frozen" and begins_anew and model.get(key) is None:
        yield ConfigError(
            "model.norm=frozen",
            "it keeps the mean and variance of trained weights, and these weights are initial ones",
            f"model.{key}=<weights>, start_from=<run folder>, or model.norm=batch",
        )


def check_mesh(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check the mesh of a run that takes or plans steps; every other mode runs on one device.

    Args:
        run: Composed run whose nodes match their signatures.
        has_ranks: Whether its number of ranks is valid, else that is reported separately.
    """
    config = run.config
    is_planned = run.mode.plans_steps  # a plan reads its number of ranks from the planned hardware
    if not is_planned and not (run.mode.takes_steps and has_ranks):
        return
    names = MODEL_SIZES if is_planned else (*MODEL_SIZES, "expert_parallel_size")
    if any(config.get(name, 1) < 1 for name in names):
        return  # reported by the check of ranges
    wrong_sizes = [] if is_planned else [*_find_mistake(lambda: run.mesh)]
    if wrong_sizes:
        yield from wrong_sizes
        return
    tensor, context, pipeline = (config.get(name, 1) for name in MODEL_SIZES)
    if tensor == context == pipeline == 1:
        return
    yield from _check_model(config, (tensor, context, pipeline))
    yield from _check_sequence(config, tensor, context)
    if max(context, pipeline) > 1 and run.mode.reads_logits:
        typed = {"context_parallel_size": context, "pipeline_parallel_size": pipeline}
        yield ConfigError(
            f"mode={run.mode.name} {' '.join(f'{name}={size}' for name, size in typed.items() if size > 1)}",
            "its checks read the logits of complete sequences, and each rank has only a part of them or none",
            " ".join(f"{name}=1" for name, size in typed.items() if size > 1),
        )
    if tensor > 1:
        yield from _check_tensor(run, tensor)
    if pipeline > 1 and not is_planned and "num_layers" in config["model"]:  # else the model is refused above
        yield from _check_pipeline(run, pipeline)


def _check_model(config: Mapping[str, Any], sizes: tuple[int, int, int]) -> Iterator[ConfigError]:
    """Check that the model supports tensor parallelism and that its heads and vocabulary divide evenly."""
    model, target = config["model"], str(config["model"]["_target_"])
    constants = read_signature(target).constants
    for name, size, declared in zip(MODEL_SIZES, sizes, ("tensor_parallel", "context", "pipeline_ends"), strict=True):
        if size > 1 and declared not in constants:
            yield ConfigError(
                f"{name}={size} model._target_={target}",
                "it does not declare how it is sharded over ranks",
                f"{name}=1, or model=gpt2, model=llama_160m or another size of them",
            )
            return
    tensor, *_ = sizes
    if tensor == 1:
        return
    heads = int(model["num_heads"])
    wanted = [("num_heads", heads), ("num_kv_heads", int(model.get("num_kv_heads", heads)))]
    width = "moe_intermediate_size" if "moe_intermediate_size" in model else "ffn_hidden_size"
    wanted.append((width, int(model.get(width, 4 * model["hidden_size"]))))
    multiple = int(model.get("vocab_pad_multiple", 64))
    rows = -(-int(model["vocab_size"]) // multiple) * multiple
    for name, number in wanted:
        if number % tensor:
            yield ConfigError(
                f"tensor_parallel_size={tensor}",
                f"model.{name}={number} is not divisible by {tensor} ranks",
                f"tensor_parallel_size={math.gcd(tensor, number)}",
            )
            return
    if rows % tensor:
        yield ConfigError(
            f"tensor_parallel_size={tensor}",
            f"the vocabulary of {rows} rows is not divisible by {tensor} ranks",
            f"model.vocab_pad_multiple={multiple * tensor}",
        )


def _check_sequence(config: Mapping[str, Any], tensor: int, context: int) -> Iterator[ConfigError]:
    """Check that the sequence length divides evenly over the ranks."""
    splits = context * (tensor if config.get("sequence_parallel", True) else 1)
    seq_len = config["data"].get("seq_len") or config.get("seq_len")
    if isinstance(seq_len, int) and seq_len % splits:
        names = [f"context_parallel_size={context}"] if context > 1 else []
        names += [f"tensor_parallel_size={tensor} sequence_parallel=true"] if splits > context else []
        key = "seq_len" if config.get("seq_len") == seq_len else "data.seq_len"
        yield ConfigError(
            f"{key}={seq_len} {' '.join(names)}",
            f"{seq_len} tokens are not divisible by {splits} ranks",
            f"{key}={max(1, seq_len // splits) * splits}",
        )


def _check_tensor(run: ResolvedRun, tensor: int) -> Iterator[ConfigError]:
    """Check settings that tensor parallelism cannot be combined with."""
    config = run.config
    typed, model = f"tensor_parallel_size={tensor}", config["model"]
    if not config.get("sequence_parallel", True) and model.get("dropout"):
        yield ConfigError(
            f"{typed} sequence_parallel=false model.dropout={model['dropout']}",
            "ranks with the same tokens would drop different activations",
            "sequence_parallel=true, or model.dropout=0",
        )
    if run.optimizer.needs_unsharded:
        yield ConfigError(
            f"{typed} optimizer={run.optimizer.name}",
            "it needs unsharded matrices",
            "optimizer=adamw, or tensor_parallel_size=1",
        )
    if run.adapter is not None:
        yield ConfigError(
            f"{typed} adapter={run.adapter}",
            "adapter matrices are not sharded over ranks",
            "tensor_parallel_size=1, or adapter=none",
        )
    if run.precision == "fp8-mixed":
        yield ConfigError(
            f"{typed} precision={run.precision}",
            "products of sharded matrices are not computed in float8",
            "precision=bf16-mixed, or tensor_parallel_size=1",
        )


def _check_pipeline(run: ResolvedRun, size: int) -> Iterator[ConfigError]:
    """Check a pipeline with several stages.

    Args:
        run: Composed run whose nodes match their signatures.
        size: Number of pipeline ranks.
    """
    config = run.config
    schedule = str(config.get("pipeline_schedule", "1F1B"))
    typed, num_layers = f"pipeline_parallel_size={size}", int(config["model"]["num_layers"])
    num_stages = size * STAGES_PER_RANK.get(schedule, 1)
    if num_layers < num_stages:
        # a divisor of `size` also divides the number of ranks
        fits = next(n for n in range(size, 0, -1) if size % n == 0 and (n == 1 or num_stages * n <= num_layers * size))
        yield ConfigError(
            f"{typed} pipeline_schedule={schedule} model.num_layers={num_layers}",
            f"there are {num_stages} stages, and each needs a layer",
            f"pipeline_parallel_size={fits}, or model.num_layers={num_stages}",
        )
    if schedule == "ZBVZeroBubble" and run.compile_mode is not None:
        yield ConfigError(
            f"pipeline_schedule={schedule} compile={str(config['compile']).lower()}",
            "it splits the backward pass of a layer in two, which a compiled layer does not support (torch 2.13)",
            "compile=false, or pipeline_schedule=Interleaved1F1B",
        )
    kept = (config.get("activation_checkpoint") or {}).get("save_ops")
    if schedule == "ZBVZeroBubble" and kept:
        yield ConfigError(
            f"pipeline_schedule={schedule} activation_checkpoint.save_ops={kept}",
            "it splits the backward pass of a layer in two, and torch (2.13) recomputes from saved tensors only once",
            "activation_checkpoint=full, or pipeline_schedule=Interleaved1F1B",
        )
    if run.adapter is not None:
        yield ConfigError(
            f"{typed} adapter={run.adapter}",
            "an adapter attaches to all layers, and each rank has only some of them",
            "pipeline_parallel_size=1, or adapter=none",
        )
    if run.mode.reads_micro_batches:
        yield ConfigError(
            f"{typed} mode={run.mode.name}",
            "it compares the gradients of micro-batches, which a pipeline adds up",
            "pipeline_parallel_size=1",
        )
    if "pipeline" in run.task.supports:  # else no number of them helps, and the task says so
        yield from _check_micro_batches(run, schedule, size)


def _check_micro_batches(run: ResolvedRun, schedule: str, size: int) -> Iterator[ConfigError]:
    """Check that there are enough micro-batches for the schedule (torch 2.13)."""
    ranks, batch, micro = run.num_data_ranks, run.global_batch_size, run.micro_batch_size
    number = run.accumulate_grad_batches or (batch // (micro * ranks) if micro else 1)
    needs = least_micro_batches(schedule, size)
    if number >= needs and (schedule != "Interleaved1F1B" or number % (number // size) == 0):
        return
    multiple = ", or a multiple of them" if schedule == "Interleaved1F1B" else ""
    most = batch // (ranks * needs)
    fits = next((number for number in range(most, 0, -1) if batch % (ranks * number) == 0), None)
    yield ConfigError(
        f"pipeline_parallel_size={size} pipeline_schedule={schedule}",
        f"it needs at least {needs} micro-batches per rank{multiple}, but has {number}",
        f"micro_batch_size={fits}" if fits else f"global_batch_size={ranks * needs} micro_batch_size=1",
    )


# Check mixture-of-experts settings: number of experts, and what they cannot be combined with.

_OURS = "recipes.model.moe."  # whose sizes are known; a model of another package checks its own


def check_moe(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check a model that routes tokens to experts.

    Args:
        run: Composed run whose nodes match their signatures.
        has_ranks: Whether its number of ranks is valid, else that is reported separately.
    """
    config, model = run.config, run.config["model"]
    if not read_signature(str(model["_target_"])).constants.get("routes_tokens"):
        size = config.get("expert_parallel_size", 1)
        if size != 1 and (run.mode.takes_steps or run.mode.plans_steps):
            yield ConfigError(
                f"expert_parallel_size={size} model._target_={model['_target_']}",
                "it has no experts",
                "expert_parallel_size=1, or model=mixtral_nano or another one with experts",
            )
        return
    if str(model["_target_"]).startswith(_OURS):
        yield from find_wrong_experts(model)
        if "qk_rope_head_dim" in model:
            yield from find_wrong_latent_heads(model)
    yield from _adapter_and_precision(run)
    if run.mode.plans_steps or (run.mode.takes_steps and has_ranks):
        yield from _check_division(run)
    if run.mode.takes_steps:
        yield from _steps(run)


def _adapter_and_precision(run: ResolvedRun) -> Iterator[ConfigError]:
    if run.adapter is not None:
        yield ConfigError(
            f"adapter={run.adapter} with experts",
            "an adapter attaches to linear layers, and experts are not linear layers",
            "adapter=none",
        )
    if run.precision == "fp8-mixed":
        yield ConfigError(
            f"precision={run.precision} with experts",
            "products of experts are not computed in float8",
            "precision=bf16-mixed",
        )


def _check_division(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that experts divide evenly over ranks, and their rows over the ranks with the same experts."""
    size, model = run.config.get("expert_parallel_size", 1), run.config["model"]
    if not isinstance(size, int) or size < 2:
        return
    try:
        shards = run.mesh.expert_shard if run.mode.takes_steps else 1
    except ConfigError:
        return  # reported by the checks of the mesh
    if isinstance(model.get("num_experts"), int) and model["num_experts"] % size:
        yield ConfigError(
            f"expert_parallel_size={size}",
            f"model.num_experts={model['num_experts']} is not divisible by {size} ranks",
            f"expert_parallel_size={math.gcd(size, model['num_experts'])}",
        )
        return
    for name in ("moe_intermediate_size", "hidden_size"):
        rows = model.get(name)
        if isinstance(rows, int) and rows % shards:
            multiple = math.lcm(shards, ALIGNMENT)
            yield ConfigError(
                f"model.{name}={rows} expert_parallel_size={size}",
                f"{shards} ranks share the same experts, and the rows of their matrices are not divisible by {shards}",
                f"model.{name}={-(-rows // multiple) * multiple}",
            )


def _steps(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check a run that takes steps."""
    config = run.config
    size = config.get("tensor_parallel_size", 1)
    if size != 1:
        yield ConfigError(
            f"tensor_parallel_size={size} with experts",
            "experts are not sharded with the rest of a block",
            "tensor_parallel_size=1",
        )
    losses = [name for name in ("router_aux_loss_coef", "router_z_loss") if config["model"].get(name)]
    if losses and config.get("context_parallel_size", 1) != 1:
        typed = " ".join(f"model.{name}={config['model'][name]}" for name in losses)
        yield ConfigError(
            f"context_parallel_size={config['context_parallel_size']} {typed}",
            "the loss terms of a sequence need all of its tokens, and each rank has only a part of them",
            f"{' '.join(f'model.{name}=0' for name in losses)} model.balance_rate=0.001",
        )
    divided = config.get("expert_parallel_size", 1)
    if run.optimizer.updates_matrices:
        yield ConfigError(
            f"optimizer={run.optimizer.name} with experts",
            "it would treat the stacked matrices of all experts as one",
            "optimizer=adamw",
        )
    elif run.optimizer.needs_unsharded and divided != 1:
        yield ConfigError(
            f"optimizer={run.optimizer.name} expert_parallel_size={divided}",
            "it needs unsharded matrices",
            "optimizer=adamw, or expert_parallel_size=1",
        )
