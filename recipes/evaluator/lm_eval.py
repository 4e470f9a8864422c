"""Evaluate a language model on published tasks with EleutherAI's lm-evaluation-harness (package `lm_eval`, 0.4).

The harness builds prompts and computes metrics; `Scorer` answers its requests with this project's model directly,
without an export. The package is imported only when this option is used.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.metadata import version
from itertools import chain
from typing import Annotated, Any, cast

from recipes.data.conversations.chat_template import find_template
from recipes.errors import ConfigError, type_extra
from recipes.evaluator.scorer import Scorer
from recipes.model import LanguageModel
from recipes.runtime.console import LOGGER
from recipes.task.language_modeling import LanguageModeling
from recipes.tokenizer import Tokenizer

_BOOTSTRAP = 1000  # bootstrap samples for the standard error of a metric without a formula; the harness: 100,000
_INSTALL = type_extra("eval")


@dataclass(kw_only=True)
class LmEval:
    """Runs tasks of lm-evaluation-harness.

    Args:
        tasks: Task, group or tag names, or paths of YAML files.
        task_folder: Folder of YAML files whose tasks can also be selected by name; None: only those of the harness.
        num_fewshot: Examples before each question; None: the task's own number. A task whose YAML says 0 keeps it.
        limit: Number of samples per task, taken from the start; None: all.
        batch_size: Requests per forward pass.
        apply_chat_template: Render questions with the chat template of the run.
    """

    name = "lm_eval"

    tasks: list[str]
    task_folder: str | None
    num_fewshot: Annotated[int, ">= 0"] | None
    limit: Annotated[int, ">= 1"] | None
    batch_size: Annotated[int, ">= 1"]
    apply_chat_template: bool

    def __post_init__(self) -> None:
        self._manager: Any = None
        self._loaded: list[Any] = []

    def prepare(self) -> None:
        """Load the tasks and their data.

        Raises:
            ConfigError: The package is missing, a task does not exist, or its data cannot be read.
        """
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            reason = f"the package lm_eval cannot be imported: {error}"
            raise ConfigError("evaluator=lm_eval", reason, _INSTALL) from error
        if self.task_folder is not None and not os.path.isdir(os.path.expanduser(self.task_folder)):
            setting = f"evaluator.task_folder={self.task_folder}"
            raise ConfigError(setting, "there is no such folder", "evaluator.task_folder=<folder of YAML files>")
        specs = [os.path.expanduser(name) if _is_file(name) else name for name in self.tasks]
        folder = None if self.task_folder is None else os.path.expanduser(self.task_folder)
        # indexing the harness's 14,000 tasks takes seconds
        self._manager = TaskManager(include_path=folder, include_defaults=not all(map(_is_file, specs)))
        for spec in specs:
            if not _is_file(spec) and spec not in self._manager.all_tasks:
                raise _unknown(spec, self._manager.all_tasks)
        self._loaded = [*chain.from_iterable(map(self._load, specs))]

    def _load(self, spec: str) -> Iterator[Any]:
        """Yield the outermost groups of a spec, or its tasks if it has no groups.

        Raises:
            ConfigError: The harness cannot load a task, or it is not supported.
        """
        setting = f"evaluator.tasks=[{spec}]"
        try:
            found = self._manager.load([spec])
        except (ConnectionError, FileNotFoundError) as error:
            reason = f"its data is not on this machine and cannot be downloaded: {_first_line(error)}"
            fix = "the same command once where there is network, and HF_HOME=<the folder of its downloads> here"
            raise ConfigError(setting, reason, fix) from error
        except Exception as error:  # raised by a task's YAML or its own Python code
            reason = f"the harness cannot load it: {type(error).__name__}: {_first_line(error)}"
            raise ConfigError(setting, reason, "evaluator.tasks=[<other tasks>]") from error
        for task in found["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                reason = (
                    "it executes generated code" if getattr(task, "UNSAFE_CODE", False) else "it needs images as input"
                )
                raise ConfigError(setting, f"{reason}, which is not supported", "evaluator.tasks=[<other tasks>]")
        children = {*chain.from_iterable(found.get("group_map", {}).values())}
        outer = [group for name, group in found.get("groups", {}).items() if name not in children]
        yield from outer or found["tasks"].values()

    def evaluate(self, task: LanguageModeling, tokenizer: Tokenizer) -> dict[str, Any]:
        """Run the tasks and return their metrics, with versions and settings.

        Args:
            task: Task with the model, on the device.
            tokenizer: Tokenizer that the model was trained with.

        Raises:
            ConfigError: The model cannot answer a request, or the run has no chat template.
        """
        from lm_eval import simple_evaluate

        if self.apply_chat_template and tokenizer.chat_template is None:
            reason = "the run was not trained on conversations and has no template for them"
            raise ConfigError("evaluator.apply_chat_template=true", reason, "evaluator.apply_chat_template=false")
        scorer = Scorer(
            cast(LanguageModel, task.model),
            tokenizer,
            batch_size=self.batch_size,
            forward_context=task.trainer.precision_plugin.forward_context,
            is_rendered=self.apply_chat_template,
        )
        found = simple_evaluate(
            model=_make_harness_model(scorer, tokenizer),
            tasks=self._loaded,
            num_fewshot=self.num_fewshot,
            limit=self.limit,
            bootstrap_iters=_BOOTSTRAP,
            log_samples=False,
            apply_chat_template=self.apply_chat_template,
            task_manager=self._manager,
        )
        if scorer.num_truncated:
            window = cast(LanguageModel, task.model).max_seq_len
            reason = f"are longer than the {window} tokens that the model reads: it read their ends"
            LOGGER.warning(f"{scorer.num_truncated:,} contexts {reason}")
        record = {"lm_eval": version("lm_eval"), "settings": asdict(self), "cut_contexts": scorer.num_truncated}
        return record | {"tasks": read_tasks(found)}


def read_tasks(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return version, number of few-shot examples, samples and metrics of each task or group that has metrics.

    Args:
        found: Result of the harness; metrics have the keys `<name>,<filter>` and `<name>_stderr,<filter>`.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for name, values in found["results"].items():
        metrics: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            metric, comma, answer_filter = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            title = metric if answer_filter == "none" else f"{metric}/{answer_filter}"
            stderr = values.get(f"{metric}_stderr,{answer_filter}")
            metrics[title] = {"value": _finite(value), "stderr": _finite(stderr)}
        if metrics:
            tasks[name] = {
                "version": found.get("versions", {}).get(name),
                "num_fewshot": found.get("n-shot", {}).get(name),
                "samples": found.get("n-samples", {}).get(name, {}).get("effective"),
                "metrics": metrics,
            }
    return tasks


def _finite(value: object) -> float | None:
    """Return a value as a float; None for NaN and inf, which JSON cannot represent, and for the harness's N/A."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def render_chat(messages: list[dict[str, Any]], tokenizer: Tokenizer, *, adds_prompt: bool) -> str:
    """Return a conversation as text, rendered with the template of the run.

    Args:
        messages: Roles and contents.
        tokenizer: Tokenizer with a chat template.
        adds_prompt: End with the header of an answer; otherwise the last message is left open, to be continued.

    Raises:
        ConfigError: The template rejects the conversation.
    """
    template = find_template("auto", tokenizer)
    try:
        text, _ = template.render(messages, tokenizer, adds_prompt=adds_prompt, tools=None)
    except ConfigError:
        without = [message for message in messages if message["role"] != "system"]
        if len(without) == len(messages):
            raise
        text, _ = template.render(without, tokenizer, adds_prompt=adds_prompt, tools=None)
    if adds_prompt:
        return text
    last = messages[-1]["content"]
    shown = last if last in text else last.strip()  # some templates strip white space around it
    return text[: text.rindex(shown) + len(shown)]


def _make_harness_model(scorer: Scorer, tokenizer: Tokenizer) -> Any:
    """Return a model with the harness's interface whose requests the scorer answers."""
    from lm_eval.api.model import LM

    class HarnessModel(LM):  # type: ignore[misc]
        tokenizer_name = tokenizer.fingerprint

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return scorer.score([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return scorer.score_rolling([text for text, *_ in (request.args for request in requests)])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return scorer.generate([request.args for request in requests])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return render_chat(chat_history, tokenizer, adds_prompt=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return tokenizer.chat_template if chat_template else None

    return HarnessModel()


def _unknown(name: str, known: Sequence[str]) -> ConfigError:
    near = get_close_matches(name, known, 1, cutoff=0.5)
    fix = f"evaluator.tasks=[{near[0]}]" if near else "evaluator.tasks=[<name of a task, or its YAML file>]"
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    reason = "there is no such file" if is_path else "the harness has no such task"
    return ConfigError(f"evaluator.tasks=[{name}]", reason, fix)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and os.path.isfile(os.path.expanduser(name))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
