"""Check that the layers divide into pipeline stages, and the global batch into the schedule's micro-batches."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.mesh import count_data_ranks
from recipes.config.ranks import get_ranks
from recipes.config.traits import get_compile_mode
from recipes.errors import ConfigError
from recipes.mesh import STAGES_PER_RANK, least_micro_batches


def check_pipeline(config: Mapping[str, Any], size: int) -> Iterator[ConfigError]:
    """Check a pipeline with several stages.

    Args:
        config: Composed config whose nodes match their signatures.
        size: Number of pipeline ranks.
    """
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
    if schedule == "ZBVZeroBubble" and get_compile_mode(config) is not None:
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
    adapter = str((config.get("adapter") or {}).get("_target_", "recipes.adapter.NoAdapter"))
    if not adapter.endswith(".NoAdapter"):
        yield ConfigError(
            f"{typed} adapter={adapter.split('.')[-2]}",
            "an adapter attaches to all layers, and each rank has only some of them",
            "pipeline_parallel_size=1, or adapter=none",
        )
    if config["mode"]["_target_"].rpartition(".")[2] == "noise_scale":
        yield ConfigError(
            f"{typed} mode=noise_scale",
            "it compares the gradients of micro-batches, which a pipeline adds up",
            "pipeline_parallel_size=1",
        )
    yield from _check_micro_batches(config, schedule, size)


def _check_micro_batches(config: Mapping[str, Any], schedule: str, size: int) -> Iterator[ConfigError]:
    """Check that there are enough micro-batches for the schedule (torch 2.13)."""
    ranks = count_data_ranks(config, get_ranks(config).world_size)
    batch, micro = int(config["global_batch_size"]), config["micro_batch_size"]
    number = config["trainer"]["accumulate_grad_batches"] or (batch // (micro * ranks) if micro else 1)
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
