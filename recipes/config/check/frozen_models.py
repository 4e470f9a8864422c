"""Check the frozen models that a task asks, such as a teacher: their tokens, their weights, and where they are held."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.errors import ConfigError
from recipes.foreign_file import missing_published

_UNTESTED = ("tensor_parallel_size", "expert_parallel_size")


def check_frozen_models(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check each frozen model of a run that computes its objective; other modes build none."""
    if not (run.mode.takes_steps or run.mode.plans_steps):
        return
    for section in run.task.frozen_sections:
        node = run.config.get(section)
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            reason = f"task={_name(run)} asks this model in every step"
            yield ConfigError(f"{section}={to_setting(node)}", reason, f"model@{section}=<an option of model>")
            continue
        yield from _check_samples(run, section, node)
        yield from _check_weights(run, section, node)
        yield from check_engine(run, section)
        yield from _check_context(run, section, node)


def _check_samples(run: ResolvedRun, section: str, node: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that the model reads the samples of the run, and predicts what the trained one predicts."""
    kind = find_signature(node["_target_"]).constants.get("input_kind")
    kinds = run.task.input_kinds
    if kind not in kinds:
        reason = f"it takes {kind}, and the task {' or '.join(kinds)}"
        yield ConfigError(
            f"{section}._target_={node['_target_']}", reason, f"model@{section}=<a model of {' or '.join(kinds)}>"
        )
        return
    own, trained = node.get("vocab_size"), run.config["model"].get("vocab_size")
    if own is not None and trained is not None and own != trained:
        is_published = node.get("pretrained") is not None
        yield ConfigError(
            f"{section}.vocab_size={own} model.vocab_size={trained}",
            f"what the {section} predicts over its tokens says nothing of others",
            f"model.vocab_size={own}, with the tokenizer of the {section}"
            if is_published
            else f"{section}.vocab_size={trained}",
        )
    longest = node.get("max_seq_len")
    if isinstance(longest, int) and run.seq_len is not None and run.seq_len > longest:
        reason = f"the {section} reads the same samples, and accepts at most {section}.max_seq_len={longest} tokens"
        yield ConfigError(f"seq_len={run.seq_len}", reason, f"seq_len={longest}")


def _check_weights(run: ResolvedRun, section: str, node: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that the model has weights that somebody trained, which a plan does not read."""
    pretrained = node.get("pretrained")
    if not run.mode.takes_steps:
        return
    if pretrained is None:
        yield ConfigError(
            f"{section}.pretrained=null",
            f"a {section} whose weights are drawn from the seed knows nothing",
            f"{section}.pretrained=<folder or hub name>, such as what mode=export writes of a run",
        )
    elif (missing := missing_published(str(pretrained), f"{section}.pretrained")) is not None:
        yield missing


def check_engine(run: ResolvedRun, section: str) -> Iterator[ConfigError]:
    """Reject what shards the trained model alone, and not the frozen one, which `section` names."""
    task, strategy = f"task={_name(run)}", run.strategy
    if strategy.stage == 3:
        yield ConfigError(
            f"{strategy.typed} {task}",
            f"ZeRO-3 gathers the weights of the model that it trains, and of no {section} beside it",
            "strategy=fsdp, which shards both",
        )
    if run.pipeline_parallel_size > 1 and "pipeline" not in run.task.supports:
        yield ConfigError(
            f"pipeline_parallel_size={run.pipeline_parallel_size} {task}",
            f"a pipeline splits the trained model into stages, and the last one would lack the {section}",
            "pipeline_parallel_size=1",
        )
    for name in _UNTESTED:
        if (size := run.config.get(name, 1)) > 1:
            yield ConfigError(
                f"{name}={size} {task}", f"the {section} is sharded over the ranks of strategy=fsdp only", f"{name}=1"
            )
    if run.mode.plans_steps and (run.config.get("plan") or {}).get("search"):
        reason = f"a search places the trained model, and no {section} beside it"
        yield ConfigError(f"plan.search=true {task}", reason, "plan.search=false")


def _check_context(run: ResolvedRun, section: str, node: Mapping[str, Any]) -> Iterator[ConfigError]:
    size = run.config.get("context_parallel_size", 1)
    if size > 1 and "context" not in find_signature(node["_target_"]).constants:
        reason = f"the {section} does not declare how it shares a sequence"
        yield ConfigError(f"context_parallel_size={size} task={_name(run)}", reason, "context_parallel_size=1")


def _name(run: ResolvedRun) -> str:
    return run.choices.get("task", "…")
