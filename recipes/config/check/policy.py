"""Check runs that learn from rewards: that they sample completions, and that groups of them can be compared."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.preference import check_reference
from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.config.traits import read_target_kinds
from recipes.errors import ConfigError

# tasks that learn from completions -> the recipe that sets each
_TASKS = {"recipes.task.policy.PolicyTuning": "grpo", "recipes.task.actor_critic.ActorCritic": "ppo"}


def check_rollout(config: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[ConfigError]:
    """Check that task, loss and rollout all learn from sampled completions, or none of them.

    Args:
        config: A config with all its sections.
        choices: Options of its groups.
    """
    sections = ("task", "loss", "rollout")
    task, loss, rollout = (f"{section}={choices.get(section, '…')}" for section in sections)
    recipe = _TASKS.get(config["task"]["_target_"])
    is_policy = recipe is not None
    predicts, asks = recipe == "ppo", bool(find_signature(config["loss"]["_target_"]).constants.get("needs_values"))
    reads = "completions" in (read_target_kinds(config["loss"]) or ())
    samples = "_target_" in (config.get("rollout") or {})
    if reads and not is_policy:
        reason = "it learns from completions that are sampled and rewarded, and this task samples none"
        yield ConfigError(f"{loss} {task}", reason, f"recipe={'ppo' if asks else 'grpo'}, or another loss")
    if samples and not is_policy:
        yield ConfigError(f"{rollout} {task}", "this task samples no completions", "recipe=grpo, or rollout=none")
    if is_policy and not reads:
        yield ConfigError(f"{loss} {task}", "it learns nothing from rewards of completions", f"loss={recipe}")
    elif is_policy and asks and not predicts:
        reason = "it measures rewards by values, which the model of this task does not predict"
        yield ConfigError(f"{loss} {task}", reason, "recipe=ppo, or loss=grpo")
    elif is_policy and predicts and not asks:
        yield ConfigError(f"{loss} {task}", "it does not train the values that this task predicts", "recipe=grpo")
    if is_policy and "sources" in config["data"]:
        reason, fix = "a mixture is of texts, and a policy answers prompts", "data=prompts data.path=<a folder or glob>"
        yield ConfigError(f"data={choices.get('data', '…')} {task}", reason, f"{fix}, which reads all of its files")
    if is_policy and not samples:
        yield ConfigError(f"{rollout} {task}", "nothing samples the completions that it learns from", "rollout=local")


def check_policy(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check a run whose task samples completions; nothing of other runs.

    Args:
        run: The run.
        has_ranks: Whether its number of ranks is valid, else that is reported separately.
    """
    if run.config["task"]["_target_"] not in _TASKS:
        return
    task = f"task={run.choices.get('task', '…')}"
    loss = run.config["loss"]
    yield from _check_mode(run, task)
    yield from _check_groups(run, has_ranks=has_ranks)
    yield from _check_window(run)
    for name in run.config.get("eval_data") or {}:
        reason = f"of {task}, the held-out prompts of data= alone are answered"
        yield ConfigError(f"eval_data.{name}=…", reason, "data.val_path=<a file or glob with its prompts, too>")
    yield from _check_values(run, task)
    yield from _check_tie(run)
    if loss.get("kind") == "gspo" and str(loss.get("importance")).startswith("token_"):
        reason = "its completions have one ratio each, of which weights of single tokens would correct nothing"
        fix = f"loss.importance={loss['importance'].replace('token', 'sequence')}"
        yield ConfigError(f"loss.kind=gspo loss.importance={loss['importance']}", reason, fix)
    if find_signature(run.config["model"]["_target_"]).constants.get("routes_tokens"):
        reason = "its experts are balanced by a term of the loss of texts, which is no part of this one"
        yield ConfigError(f"model={run.choices.get('model', '…')} {task}", reason, "model=<one without experts>")
    if run.config["context_parallel_size"] > 1:
        size = run.config["context_parallel_size"]
        reason = "a completion is sampled token by token, and its tokens would be on several ranks"
        yield ConfigError(f"context_parallel_size={size} {task}", reason, "context_parallel_size=1")
    if run.pipeline_parallel_size > 1:
        size = run.pipeline_parallel_size
        reason = "a completion is sampled by the whole model, of which a rank would have one stage"
        yield ConfigError(f"pipeline_parallel_size={size} {task}", reason, "pipeline_parallel_size=1")


def _check_mode(run: ResolvedRun, task: str) -> Iterator[ConfigError]:
    """Check that the mode reads no loss of samples: without a rollout there is none, and it has no lowest value."""
    mode, reason, fix = run.mode.name, None, ""
    if mode == "predict":
        reason, fix = "a policy answers with text", "mode=evaluate, or mode=sample mode.prompt=<text>"
    elif mode == "replay":
        reason = "its samples are prompts, whose completions are not kept: those written are in completions.jsonl"
        fix = "callbacks.completions.every_n_steps=1 in training"
    elif mode == "lr_find":
        reason = "it looks for the rate at which the loss falls, and that of a policy lies around 0 whatever it learns"
        fix = "-m optimizer.lr=1e-6,5e-6,2e-5, whose jobs are ranked by val/reward"
    elif mode == "evaluate" and run.config["mode"].get("split") == "train":
        yield ConfigError("mode.split=train", "the prompts that are answered are those of validation", "mode.split=val")
    if reason is not None:
        yield ConfigError(f"mode={mode} {task}", reason, fix)


def _check_values(run: ResolvedRun, task: str) -> Iterator[ConfigError]:
    """Check a loss that measures rewards by values of tokens; nothing of other losses."""
    loss = run.config["loss"]
    if not find_signature(loss["_target_"]).constants.get("needs_values"):
        return
    if loss.get("kl_target") is not None and not loss["kl_weight"]:
        setting = f"loss.kl_target={loss['kl_target']} loss.kl_weight={loss['kl_weight']}"
        reason = "the weight is multiplied until the divergence is at the target, and 0 stays 0"
        yield ConfigError(setting, reason, "loss.kl_weight=0.05, or loss.kl_target=null")
    if run.config["task"].get("value") == "model" and run.strategy.stage == 3:
        reason = "ZeRO-3 fills the weights of one model, and a second one begins with the same"
        yield ConfigError(
            f"{run.strategy.typed} task.value=model", reason, "strategy=fsdp, which shards both, or task.value=head"
        )
    if run.config["tensor_parallel_size"] > 1:
        reason = "values are computed beside the probabilities of all tokens, of which a rank would have a part"
        size = run.config["tensor_parallel_size"]
        yield ConfigError(f"tensor_parallel_size={size} {task}", reason, "tensor_parallel_size=1")


def _check_groups(run: ResolvedRun, *, has_ranks: bool) -> Iterator[ConfigError]:
    """Check that groups are whole, and each completion is compared with others: of its group, or of the batch."""
    number, batch_size = run.config["rollout"].get("num_generations"), run.global_batch_size
    baseline, scale = (run.config["loss"].get(name) for name in ("baseline", "scale_rewards"))
    setting = f"rollout.num_generations={number}"
    if baseline == "batch" and scale == "group":
        reason = "a group of equal rewards has the deviation 0, and may be far from the mean of the batch"
        yield ConfigError("loss.baseline=batch loss.scale_rewards=group", reason, "loss.scale_rewards=batch")
    if not isinstance(number, int) or number < 1 or batch_size < 1:
        return  # out of range, which that check reports
    if number == 1 and baseline not in (None, "batch"):
        reason = "a completion would be compared with itself alone, and all advantages be 0"
        fix = "rollout.num_generations=8, or loss.baseline=batch loss.scale_rewards=batch"
        yield ConfigError(f"{setting} loss.baseline={baseline}", reason, fix)
    elif batch_size == 1 and baseline is not None:
        reason = "its one completion would be compared with itself alone, and its advantage be 0"
        yield ConfigError("global_batch_size=1", reason, f"global_batch_size={max(number, 8)}")
    elif batch_size % number:
        parts = (run.num_data_ranks if has_ranks else 1, run.micro_batch_size, run.accumulate_grad_batches)
        unit = math.lcm(number, math.prod(part or 1 for part in parts))
        below = batch_size // unit * unit
        fix = f"global_batch_size={below + unit}" + (f" (or {below})" if below else "")
        yield ConfigError(
            f"global_batch_size={batch_size}", f"it counts completions, and each prompt has {setting}", fix
        )


def _check_window(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that a row has room for a prompt beside the longest completion."""
    longest, most = run.config["rollout"].get("max_new_tokens"), run.config["model"].get("max_seq_len")
    if not isinstance(longest, int) or run.seq_len is None or longest < 1 or run.seq_len > longest:
        return
    shorter = f"rollout.max_new_tokens={run.seq_len // 2}, or " if run.seq_len > 1 else ""
    larger = f"seq_len={2 * longest}"
    if isinstance(most, int) and most < 2 * longest:
        larger = f"model.max_seq_len={2 * longest} {larger}, of a model that has so many positions"
    reason = f"prompt and completion have to fit into seq_len={run.seq_len}"
    yield ConfigError(f"rollout.max_new_tokens={longest}", reason, f"{shorter}{larger}")


def _check_tie(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the reference that the loss ties the model to."""
    loss, kind = run.config["loss"], run.config["task"]["reference"]
    name, usual = ("beta", 0.04) if "beta" in loss else ("kl_weight", 0.05)
    if loss.get(name, 0.0) > 0:
        of_auto = "frozen_copy" if run.adapter is None else "adapter_off"
        yield from check_reference(run, of_auto if kind == "auto" else kind, instead=f"loss.{name}=0")
    elif kind != "auto":
        reason = "a loss without the term of the divergence asks no reference"
        fix = f"task.reference=auto, or loss.{name}={usual}"
        yield ConfigError(f"task.reference={kind} loss.{name}={loss.get(name)}", reason, fix)
