"""Check values against the range in their annotation, such as `Annotated[int, ">= 1"]`, read from source."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.nodes import is_repeated
from recipes.config.check.sections import SETTINGS
from recipes.config.check.types import annotation_from, find_out_of_range, matches_type
from recipes.config.signature import find_signature
from recipes.config.traits import list_nodes, select
from recipes.errors import ConfigError

# arguments of Lightning's Trainer, and of Hydra's and Optuna's sweepers, which declare no ranges; and a short form
_OF_OTHERS = {
    "optimizer.layer_decay": "Annotated[float, '> 0, <= 1'] | None",
    "hydra.sweeper.max_batch_size": "Annotated[int, '>= 1'] | None",
    "hydra.sweeper.sampler.n_startup_trials": "Annotated[int, '>= 0']",
    "hydra.sweeper.sampler.n_ei_candidates": "Annotated[int, '>= 1']",
    "hydra.sweeper.pruner.n_startup_trials": "Annotated[int, '>= 0']",
    "hydra.sweeper.pruner.n_warmup_steps": "Annotated[int, '>= 0']",
    "hydra.sweeper.pruner.interval_steps": "Annotated[int, '>= 1']",
    "hydra.sweeper.pruner.n_min_trials": "Annotated[int, '>= 1']",
    "trainer.max_steps": "Annotated[int, '>= 1']",
    "trainer.min_steps": "Annotated[int, '>= 1'] | None",
    "trainer.num_nodes": "Annotated[int, '>= 1']",
    "trainer.accumulate_grad_batches": "Annotated[int, '>= 1'] | None",
    "trainer.gradient_clip_val": "Annotated[float, '> 0, <= inf'] | None",
}


def check_ranges(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check every value of the config that has a declared range; values of the wrong type are skipped."""
    for key, source in (SETTINGS | _OF_OTHERS).items():
        yield from _check(key, select(config, key), annotation_from(source))
    for path, node in list_nodes(config):
        parameters = {} if is_repeated(path) else find_signature(node["_target_"]).parameters
        for name, value in node.items():
            if name in parameters:
                yield from _check(f"{path}.{name}", value, parameters[name].annotation)


def _check(key: str, value: object, annotation: ast.expr | None) -> Iterator[ConfigError]:
    if annotation is None or not matches_type(value, annotation):
        return
    if (found := find_out_of_range(value, annotation)) is not None:
        index, number, bounds = found
        fix = f"'{key}=[…]', each {bounds}" if index.startswith("[") else f"{key}{index}=<{bounds.removeprefix('a ')}>"
        if key == "trainer.gradient_clip_val" and number == 0:  # as Lightning has it
            fix = f"{fix}, or {key}=null for no clipping"
        yield ConfigError(f"{key}{index}={number}", f"it must be {bounds}", fix)
