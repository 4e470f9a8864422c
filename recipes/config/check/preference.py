"""Check runs that learn from preferences: what their reference needs, and what cannot divide the rows of a pair."""

from collections.abc import Iterator

from recipes.config.check.frozen_models import check_engine
from recipes.config.check.types import to_setting
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
    of_loss = find_signature(run.config["loss"]["_target_"]).constants
    reads = of_loss.get("reads")
    task = f"task={run.choices.get('task', 'preference')}"
    if reads not in (None, _TASKS[node["_target_"]]):
        reason = f"it compares {reads} of answers, and this task gives {_TASKS[node['_target_']]}"
        fix = "task=reward" if reads == "scores" else "task=preference"
        yield ConfigError(f"loss={run.choices.get('loss', '…')} {task}", reason, f"{fix}, or another loss")
    elif node.get("reference", "auto") != "auto":
        yield from _check_reference(run, node["reference"], needs_one=bool(of_loss.get("needs_reference", True)))
    elif "reference" in node and of_loss.get("needs_reference", True):
        yield from _check_modules_to_save(run, "auto", instead=None)
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


def list_references(run: ResolvedRun) -> list[str]:
    """Return the kinds of reference that a run can have, its own first; empty if it asks none."""
    node, loss = run.config["task"], find_signature(run.config["loss"]["_target_"]).constants
    if node["_target_"] not in _TASKS or "reference" not in node or not loss.get("needs_reference", True):
        return []
    kinds = ["precomputed", "frozen_copy"] if run.adapter is None else ["adapter_off", "precomputed"]
    own = kinds[0] if node["reference"] == "auto" else node["reference"]
    return [own, *(kind for kind in kinds if kind != own and not [*_check_reference(run, kind, needs_one=True)])]


def _check_reference(run: ResolvedRun, kind: str, *, needs_one: bool) -> Iterator[ConfigError]:
    """Check that a run can have the reference that is typed."""
    if not needs_one:
        loss = f"loss={run.choices.get('loss', '…')}"
        reason = "this loss compares answers with each other alone, and asks no reference"
        fix = f"task.reference=auto, or loss=dpo instead of {loss}"
        yield ConfigError(f"task.reference={kind} {loss}", reason, fix)
        return
    yield from check_reference(run, kind, instead=None)


def check_reference(run: ResolvedRun, kind: str, *, instead: str | None) -> Iterator[ConfigError]:
    """Check that a run can have a reference of a kind.

    Args:
        run: The run.
        kind: `adapter_off`, `frozen_copy` or, of a task that has one, `precomputed`.
        instead: What to type for a loss without a reference; None: its task has a precomputed one.
    """
    setting, precomputes = f"task.reference={kind}", instead is None
    if kind == "adapter_off" and run.adapter is None:
        others = "precomputed or frozen_copy" if precomputes else "frozen_copy"
        fix = f"adapter=lora, or task.reference={others}"
        yield ConfigError(setting, "the model has no adapter to switch off", fix)
        return
    if mistakes := [*_check_modules_to_save(run, kind, instead=instead)]:
        yield from mistakes
    elif kind == "frozen_copy" and run.adapter is not None:
        reason = "the weights beside the adapter are frozen already, and a copy would hold them twice"
        fix = "task.reference=adapter_off" + (", or precomputed" if precomputes else "")
        yield ConfigError(f"{setting} adapter={run.adapter}", reason, fix)
    elif kind == "frozen_copy" and (run.mode.takes_steps or run.mode.plans_steps) and run.pipeline_parallel_size == 1:
        for mistake in check_engine(run, "reference"):
            fix = f"{mistake.fix}, or {instead or 'task.reference=precomputed'}"
            yield ConfigError(f"{setting} {mistake.setting}", mistake.reason, fix)


def _check_modules_to_save(run: ResolvedRun, kind: str, *, instead: str | None) -> Iterator[ConfigError]:
    """Reject modules that are trained beside an adapter, which no reference has as they were."""
    modules = run.config.get("adapter", {}).get("modules_to_save")
    if modules:
        reason = "the reference is the model without its adapter, and these modules change in the training"
        fix = f"adapter.modules_to_save=[], or {instead or 'loss=orpo, which asks no reference'}"
        yield ConfigError(f"task.reference={kind} adapter.modules_to_save={to_setting(modules)}", reason, fix)
