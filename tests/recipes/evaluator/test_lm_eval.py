"""`evaluator=lm_eval`: a whole command with the package where it is installed, else with a small stand-in for it."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from chats import CHATS, TEMPLATES, chat_tokenizer, messages_of
from support import TINY, execute, write_texts

from recipes.evaluator import lm_eval
from recipes.evaluator.lm_eval import read_tasks, render_chat

QUESTIONS = [{"question": "one two", "choices": ["three", "four"], "answer": 0} for _ in range(5)]
CHOICE = """
task: my_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 2.0}}
"""
RESULTS = {
    "results": {
        "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4},
        "b": {"em,strict": 1, "em_stderr,strict": "N/A", "em,loose": float("nan"), "em_stderr,loose": float("inf")},
        "group": {"alias": "group"},
    },
    "versions": {"a": 1.0},
    "n-shot": {"a": 5},
    "n-samples": {"a": {"original": 10, "effective": 4}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    texts = write_texts(tmp_path_factory.mktemp("texts"))
    assert execute(*TINY, f"data.path={texts}", "trainer.max_steps=2", f"hydra.run.dir={folder}") == 0
    return folder


class StandIn:
    """The part of the package that is called: three tasks, one request of each kind."""

    class LM:
        """Base class of models."""

    class TaskManager:
        """Knows tasks by name; the last one has data elsewhere."""

        all_tasks = ("arithmetic", "hellaswag", "piqa", "risky")

        def __init__(self, *, include_path: str | None, include_defaults: bool) -> None:
            assert include_defaults

        def load(self, names: list[str]) -> dict[str, Any]:
            [name] = names
            if name == "piqa":
                raise ConnectionError("Couldn't reach 'piqa' on the Hub")
            if name == "hellaswag":
                raise KeyError("doc_to_text")
            return {"tasks": {name: SimpleNamespace(name=name, UNSAFE_CODE=name == "risky")}}

    @staticmethod
    def simple_evaluate(*, model: Any, tasks: list[Any], **settings: Any) -> dict[str, Any]:
        scored = model.loglikelihood([SimpleNamespace(args=("a" * 40, " b"))])
        rolled = model.loglikelihood_rolling([SimpleNamespace(args=("value = 1\n" * 9,))])
        model.generate_until([SimpleNamespace(args=("a", {"until": ["\n"], "max_gen_toks": 4}))])
        values = {"loglikelihood,none": scored[0][0], "rolled,none": rolled[0]}
        return {"results": {task.name: values for task in tasks}, "n-shot": {tasks[0].name: settings["num_fewshot"]}}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model")}
    vars(modules["lm_eval"])["simple_evaluate"] = StandIn.simple_evaluate
    vars(modules["lm_eval.tasks"])["TaskManager"] = StandIn.TaskManager
    vars(modules["lm_eval.api.model"])["LM"] = StandIn.LM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(lm_eval, "version", lambda _: "0.4.13")


def evaluate(run: Path, tasks: str, *overrides: str) -> int:
    return execute("mode=evaluate", "evaluator=lm_eval", f"evaluator.tasks=[{tasks}]", f"resume={run}", *overrides)


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    return lambda: "".join(capfd.readouterr())  # type: ignore[return-value]


@pytest.mark.usefixtures("stand_in")
def test_the_command_answers_requests_and_writes_metrics(run: Path, logged: Any) -> None:
    assert evaluate(run, "arithmetic", "evaluator.num_fewshot=3") == 0
    record = json.loads((run / "evaluate_lm_eval.json").read_text())
    assert record["checkpoint"].endswith("step_0000002.ckpt")
    assert (record["lm_eval"], record["cut_contexts"], record["weights"]) == ("0.4.13", 1, "trained")
    assert record["settings"]["num_fewshot"] == record["tasks"]["arithmetic"]["num_fewshot"] == 3
    metrics = {name: found["value"] for name, found in record["tasks"]["arithmetic"]["metrics"].items()}
    # two and ninety tokens of a model that has learned next to nothing: about ln 257 = 5.55 each
    assert -14.0 < metrics["loglikelihood"] < -9.0
    assert -600.0 < metrics["rolled"] < -400.0
    summary = json.loads((run / "summary.json").read_text())
    described = {"checkpoint": "step_0000002.ckpt", "weights": "trained"}
    assert summary["evaluations"]["arithmetic"] == described | metrics
    text = logged()
    assert "1 contexts are longer than the 32 tokens that the model reads" in text
    assert f"on arithmetic: loglikelihood {metrics['loglikelihood']:.4f}" in text


@pytest.mark.parametrize(
    ("tasks", "typed", "expected"),
    [
        ("helaswag", [], "the harness has no such task\n   type: evaluator.tasks=[hellaswag]"),
        ("mine.yaml", [], "there is no such file"),
        ("piqa", [], "cannot be downloaded: Couldn't reach 'piqa' on the Hub"),
        ("hellaswag", [], "the harness cannot load it: KeyError: 'doc_to_text'"),
        ("risky", [], "it executes generated code, which is not supported"),
        ("arithmetic", ["evaluator.task_folder=nowhere"], "there is no such folder"),
        ("arithmetic", ["evaluator.apply_chat_template=true"], "the run was not trained on conversations"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_a_mistake_is_one_sentence(run: Path, logged: Any, tasks: str, typed: list[str], expected: str) -> None:
    assert evaluate(run, tasks, *typed) == 2
    text = logged()
    assert expected in text
    assert "The config has 1 mistake" in text


def test_the_missing_package_is_named(run: Path, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(run, "hellaswag") == 2
    assert "type: pip install -e '.[eval]'" in logged()


@pytest.mark.usefixtures("stand_in")
def test_a_run_on_tokens_has_no_tokenizer(tmp_path: Path, logged: Any) -> None:
    folder = tmp_path / "tokens"
    shape = [override for override in TINY if override.startswith(("model.", "~", "global", "eval"))]
    typed = ["data=random_tokens", "data.vocab_size=257", "trainer.max_steps=1", f"hydra.run.dir={folder}"]
    assert execute(*shape, *typed) == 0
    assert evaluate(folder, "arithmetic") == 2
    assert "it has no tokenizer" in logged()


def test_metrics_are_read_with_their_errors_and_filters() -> None:
    found = read_tasks(RESULTS)
    assert found == {
        "a": {
            "version": 1.0,
            "num_fewshot": 5,
            "samples": 4,
            "metrics": {"acc": {"value": 0.5, "stderr": 0.1}},
        },
        "b": {
            "version": None,
            "num_fewshot": None,
            "samples": None,
            "metrics": {"em/strict": {"value": 1.0, "stderr": None}, "em/loose": {"value": None, "stderr": None}},
        },
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_transformers_does(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = chat_tokenizer(TEMPLATES[name])
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for chat in CHATS:
        messages = messages_of(chat)
        for adds_prompt, shown in ((True, messages[:-1]), (False, messages)):
            expected = theirs.apply_chat_template(
                shown, tokenize=False, add_generation_prompt=adds_prompt, continue_final_message=not adds_prompt
            )
            assert render_chat(shown, tokenizer, adds_prompt=adds_prompt) == expected


def test_a_system_message_that_the_template_rejects_is_left_out() -> None:
    tokenizer = chat_tokenizer(TEMPLATES["brackets"])
    messages = messages_of([("system", "Be short."), ("user", "1 + 1?")])
    assert render_chat(messages, tokenizer, adds_prompt=True) == "<s>[INST] 1 + 1? [/INST]"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs pip install -e '.[eval]'")
def test_a_task_of_ones_own_runs_in_the_harness(run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "questions.jsonl"
    rows.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = tmp_path / "choice.yaml"
    task.write_text(CHOICE.format(path=rows))
    assert evaluate(run, str(task), "evaluator.limit=4", "evaluator.batch_size=3") == 0
    found = json.loads((run / "evaluate_lm_eval.json").read_text())["tasks"]["my_choice"]
    assert (found["version"], found["num_fewshot"], found["samples"]) == (2.0, 0, 4)
    assert found["metrics"]["acc"]["value"] in (0.0, 1.0)  # four times the same question
    assert evaluate(run, "my_choice", f"evaluator.task_folder={tmp_path}", "evaluator.limit=1") == 0
