"""Build the training step of a config, so that it can be recorded."""

from collections.abc import Sequence
from typing import Any

import torch
from plan_cases import COMMON, cpu_cluster
from support import composed_config

from recipes.config.instantiate import make
from recipes.numerics.accumulation import divide
from recipes.plan.config_step import describe_step, find_engine
from recipes.plan.step import Step


def config_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed config of a case."""
    return composed_config(*COMMON, *overrides)


def step_of(overrides: Sequence[str], num_ranks: int) -> Step:
    """Return the training step of a case on this machine."""
    config = config_of(overrides)
    precision = make(config["precision"])
    with torch.device("meta"):
        model = make(config["model"])
    engine = find_engine(config, precision, cpu_cluster(num_ranks), model=model)
    accumulation = divide(
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
        num_devices=engine.mesh.data_size,
        accumulate_grad_batches=None,
    )
    return describe_step(config, precision, accumulation, engine, (config["seq_len"],), on_gpu=False)
