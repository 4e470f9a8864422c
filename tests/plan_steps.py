"""Build the training step of a config, so that it can be recorded."""

from collections.abc import Sequence
from typing import Any

import torch
from plan_cases import COMMON, cpu_cluster
from support import composed_config, resolved

from recipes.plan.recorded import describe_step, divide_ranks, find_strategy_effect
from recipes.plan.step import Step


def config_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed config of a case."""
    return composed_config(*COMMON, *overrides)


def step_of(overrides: Sequence[str], num_ranks: int) -> Step:
    """Return the training step of a case on this machine."""
    run, cluster = resolved(config_of(overrides)), cpu_cluster(num_ranks)
    precision = run.make("precision")
    with torch.device("meta"):
        model = run.make("model")
    pipeline, stage = divide_ranks(run, cluster)
    engine = find_strategy_effect(stage, pipeline, precision, cluster, model=model)
    assert run.seq_len is not None, "a case of text"
    return describe_step(run, precision, stage.accumulation, engine, (run.seq_len,), on_gpu=False)
