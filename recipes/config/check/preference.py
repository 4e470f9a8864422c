"""Check runs that learn from preferences: what their reference needs, and what cannot divide the rows of a pair."""

from collections.abc import Iterator

from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.errors import ConfigError

# what each task tells its loss of an answer
_TASKS = {
    "recipes.task.preference.PreferenceTuning": "log-probabilities",
    "recipes.task.reward.RewardModeling": "scores",
}


def check_preferences(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check a run whose task compares answers; nothing of other runs."""
    node = run.config["task"]
    if node["_target_"] not in _TASKS:
        return
    reads = find_signature(run.config["loss"]["_target_"]).constants.get("reads")
    task = f"task={run.choices.get('task', 'preference')}"
    if reads not in (None, _TASKS[node["_target_"]]):
        reason = f"it compares {reads} of answers, and this task gives {_TASKS[node['_target_']]}"
        fix = "task=reward" if reads == "scores" else "task=preference"
        yield ConfigError(f"loss={run.choices.get('loss', '…')} {task}", reason, f"{fix}, or another loss")
    if node.get("reference") == "adapter_off" and run.adapter is None:
        reason = "the model has no adapter to switch off"
        yield ConfigError("task.reference=adapter_off", reason, "adapter=lora, or task.reference=precomputed")
    if find_signature(run.config["model"]["_target_"]).constants.get("routes_tokens"):
        reason = "the balance of experts is per token of text, and an answer counts as a whole"
        yield ConfigError(f"model={run.choices.get('model', '…')} {task}", reason, "model=<one without experts>")
    if run.config["context_parallel_size"] > 1:
        size = run.config["context_parallel_size"]
        reason = "an answer has one log-probability or score, and its tokens would be on several ranks"
        yield ConfigError(f"context_parallel_size={size} {task}", reason, "context_parallel_size=1")
    if run.pipeline_parallel_size > 1:
        reason = "the rows of a pair would be in different micro-batches of the pipeline"
        yield ConfigError(
            f"pipeline_parallel_size={run.pipeline_parallel_size} {task}", reason, "pipeline_parallel_size=1"
        )
