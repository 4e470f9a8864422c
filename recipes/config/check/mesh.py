"""Check that the device mesh sizes divide the ranks, heads, vocabulary and sequence."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.pipeline import check_pipeline
from recipes.config.mesh import MODEL_SIZES, make_mesh
from recipes.config.ranks import get_ranks
from recipes.config.signature import read_signature
from recipes.config.traits import plans_steps, takes_steps
from recipes.errors import ConfigError

# optimizers of single elements; the others read whole matrices or blocks of them
_ELEMENTWISE = ("adam", "adamw", "lion", "sgd", "schedule_free")


def check_mesh(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Check the mesh of a run that takes or plans steps; every other mode runs on one device.

    Args:
        config: Composed config whose nodes match their signatures.
        world_size: Number of ranks; None if it is invalid, which is reported separately.
    """
    is_planned = plans_steps(config)  # a plan reads its number of ranks from the planned hardware
    if not is_planned and (not takes_steps(config) or world_size is None):
        return
    names = MODEL_SIZES if is_planned else (*MODEL_SIZES, "expert_parallel_size")
    if any(config.get(name, 1) < 1 for name in names):
        return  # reported by the check of ranges
    if not is_planned:
        try:
            make_mesh(config, get_ranks(config))
        except ConfigError as mistake:
            yield mistake
            return
    tensor, context, pipeline = (config.get(name, 1) for name in MODEL_SIZES)
    if tensor == context == pipeline == 1:
        return
    yield from _check_model(config, (tensor, context, pipeline))
    yield from _check_sequence(config, tensor, context)
    if max(context, pipeline) > 1 and config["mode"]["_target_"].rpartition(".")[2] == "preflight":
        typed = {"context_parallel_size": context, "pipeline_parallel_size": pipeline}
        yield ConfigError(
            f"mode=preflight {' '.join(f'{name}={size}' for name, size in typed.items() if size > 1)}",
            "its checks read the logits of complete sequences, and each rank has only a part of them or none",
            " ".join(f"{name}=1" for name, size in typed.items() if size > 1),
        )
    if tensor > 1:
        yield from _check_tensor(config, tensor)
    if pipeline > 1 and not is_planned:
        yield from check_pipeline(config, pipeline)


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


def _check_tensor(config: Mapping[str, Any], tensor: int) -> Iterator[ConfigError]:
    """Check settings that tensor parallelism cannot be combined with."""
    typed, model = f"tensor_parallel_size={tensor}", config["model"]
    if not config.get("sequence_parallel", True) and model.get("dropout"):
        yield ConfigError(
            f"{typed} sequence_parallel=false model.dropout={model['dropout']}",
            "ranks with the same tokens would drop different activations",
            "sequence_parallel=true, or model.dropout=0",
        )
    optimizer = str(config["optimizer"]["_target_"]).split(".")
    if "recipes" in optimizer and optimizer[-2] not in _ELEMENTWISE:
        yield ConfigError(
            f"{typed} optimizer={optimizer[-2]}",
            "it needs unsharded matrices",
            "optimizer=adamw, or tensor_parallel_size=1",
        )
    adapter = str((config.get("adapter") or {}).get("_target_", "recipes.adapter.NoAdapter"))
    if not adapter.endswith(".NoAdapter"):
        yield ConfigError(
            f"{typed} adapter={adapter.split('.')[-2]}",
            "adapter matrices are not sharded over ranks",
            "tensor_parallel_size=1, or adapter=none",
        )
    precision = str(config["precision"].get("name", ""))
    if precision.startswith("fp8"):
        yield ConfigError(
            f"{typed} precision={precision}",
            "products of sharded matrices are not computed in float8",
            "precision=bf16-mixed, or tensor_parallel_size=1",
        )
