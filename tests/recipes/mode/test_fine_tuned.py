"""What is done with a run that has learned from conversations: evaluate, chat, export with its template."""

import contextlib
import io
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from support import ROOT, execute, read_metrics

from recipes.data.conversations.chat_template import prompt_for_answer

SMALL = [
    *("recipe=sft", "tokenizer=bytes", "model.vocab_size=257", "model.num_layers=1", "model.hidden_size=32"),
    *("model.num_heads=2", "model.max_seq_len=96", "trainer.max_steps=2", "global_batch_size=4", "eval_every=2"),
    *("save_every=2", "warmup_steps=1", "data.val_fraction=0.3", "callbacks.generation_eval.num_samples=3"),
    "~callbacks.report",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a run of conversations, one with an adapter, and one of plain prompts."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    chat = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{2 * i}"}] for i in range(40)]
    lines = {
        "chats": [{"messages": messages} for messages in chat],
        "plain": [{"prompt": f"{i}?", "completion": f"{2 * i}"} for i in range(40)],
    }
    made = {}
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made[name] = folder / name
    typed = [f"data.path={folder / 'chats.jsonl'}", *SMALL]
    assert execute(*typed, f"hydra.run.dir={made['chats']}") == 0
    made["adapter"] = folder / "adapter"
    assert execute(*typed, "adapter=lora", f"hydra.run.dir={made['adapter']}") == 0
    plain = [f"data.path={folder / 'plain.jsonl'}", "reward=[length,mine]", f"reward.mine.path={folder}/mine.py:level"]
    (folder / "mine.py").write_text(
        "def level(prompts, completions, references, rows):\n"
        "    return [float(row['prompt'] == asked) for asked, row in zip(prompts, rows)]\n"
    )
    assert execute(*plain, *SMALL, "reward.mine.weight=0.5", f"hydra.run.dir={made['plain']}") == 0
    return made


def test_answers_are_in_the_metrics_and_in_a_file(runs: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (runs["chats"] / "answers.jsonl").open()]
    assert [row["step"] for row in rows] == [2, 2, 2]
    assert all(row["question"].endswith("<|im_start|>assistant\n") for row in rows)
    assert "val/exact_match" in (runs["chats"] / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("name", ["chats", "adapter"])
def test_evaluate_answers_questions_as_the_run_did(name: str, runs: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (runs[name] / "answers.jsonl").open()]
    assert execute("mode=evaluate", f"resume={runs[name]}", "mode.answers.num_samples=3") == 0
    found = json.loads((runs[name] / "evaluate_val.json").read_text())
    assert found["exact_match"] == sum(row["score"] for row in rows) / 3
    assert execute("mode=evaluate", f"resume={runs[name]}", "mode.answers=null") == 0
    assert "exact_match" not in json.loads((runs[name] / "evaluate_val.json").read_text())


def test_rewards_score_the_answers_in_training_and_in_an_evaluation(runs: dict[str, Path]) -> None:
    """The function of the user's sees the row of each question: it gives 1 where its prompt is that of the row."""
    last = read_metrics(runs["plain"])[-1]
    assert (last["val/reward/length"], last["val/reward/mine"], last["val/reward"]) == (1.0, 1.0, 1.5)
    typed = ["mode=evaluate", f"resume={runs['plain']}", f"reward.mine.path={runs['plain'].parent}/mine.py:level"]
    assert execute(*typed, "mode.answers.num_samples=3", "reward.length=null") == 0
    found = json.loads((runs["plain"] / "evaluate_val.json").read_text())
    assert (found["reward"], found["reward/mine"], "reward/length" in found) == (0.5, 1.0, False)


def test_a_message_is_answered_by_the_template_of_the_run(
    runs: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    typed = ["mode=sample", "mode.prompt=7?", "mode.apply_chat_template=true", "mode.max_new_tokens=4"]
    assert execute(*typed, f"resume={runs['chats']}") == 0
    assert "7?\n" in "".join(capfd.readouterr())
    own = f"reward.mine.path={runs['plain'].parent}/mine.py:level"
    assert execute(*typed, own, f"resume={runs['plain']}") == 2
    assert "the run was not trained on conversations" in "".join(capfd.readouterr())


GREEDY = ("mode.max_new_tokens=6", "mode.temperature=0")


def test_a_chat_answers_like_sample_and_each_turn_sees_the_ones_before(
    runs: dict[str, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[dict[str, str]]] = []

    def render(messages: Any, tokenizer: Any) -> Any:
        asked.append([*messages])
        return prompt_for_answer(messages, tokenizer)

    monkeypatch.setattr("recipes.mode.chat.prompt_for_answer", render)
    sample = ["mode=sample", "mode.prompt=7?", "mode.apply_chat_template=true", *GREEDY, f"resume={runs['chats']}"]
    assert execute(*sample) == 0
    answer = capfd.readouterr().out.partition("7?\n")[2].removesuffix("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("7?\n8?\n\n/new\n9?\n"))
    assert execute("mode=chat", *GREEDY, f"resume={runs['chats']}") == 0
    assert capfd.readouterr().out.partition("> ")[2].startswith(f"{answer}\n> ")
    _, first, second, new = asked  # the first only checks the template
    assert first == [{"role": "user", "content": "7?"}]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[-1]["content"] == "8?"
    assert new == [{"role": "user", "content": "9?"}]

    asked.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("7?\n"))
    assert execute("mode=chat", "mode.system=Be brief", *GREEDY, f"resume={runs['chats']}") == 0
    assert asked[-1][0] == {"role": "system", "content": "Be brief"}
    own = f"reward.mine.path={runs['plain'].parent}/mine.py:level"
    assert execute("mode=chat", own, f"resume={runs['plain']}") == 2
    assert "type: mode=sample" in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_chat_on_a_terminal_shows_an_answer_while_it_grows_and_ctrl_c_ends_only_the_answer(
    runs: dict[str, Path],
) -> None:
    process, terminal = pty.fork()
    if process == 0:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        typed = ["mode=chat", f"resume={runs['chats']}", "mode.max_new_tokens=100000"]
        os.execve(sys.executable, [sys.executable, str(ROOT / "train.py"), *typed], environ)
    shown = ""
    # prompt -> a message; its answer has begun -> Ctrl-C; prompt again -> the end
    script = [("> ", "7?\n"), ("7?\r\n", "\x03"), ("> ", "\x04")]
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(terminal, 4096):
            shown += chunk.decode(errors="replace")
            if script and script[0][0] in shown:
                _, _, shown_after = shown.partition(script[0][0])
                if script[0][1] == "\x03" and not shown_after:
                    continue
                os.write(terminal, script.pop(0)[1].encode())
                shown = shown_after
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, shown
    assert not script
    assert "Traceback" not in shown


def test_an_export_is_ready_to_chat(runs: dict[str, Path]) -> None:
    for name in ("chats", "adapter"):
        assert execute("mode=export", f"resume={runs[name]}") == 0
        tokenizer = hf.AutoTokenizer.from_pretrained(runs[name] / "export")
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "7?"}], add_generation_prompt=True, tokenize=False
        )
        written = json.loads((runs[name] / "export/generation_config.json").read_text())
        assert written["eos_token_id"] == tokenizer.eos_token_id == 256
        assert written["bos_token_id"] is None, "no text begins with the end of one"
        assert asked == "<|im_start|>user\n7?<|endoftext|>\n<|im_start|>assistant\n"
        assert hf.AutoModelForCausalLM.from_pretrained(runs[name] / "export").config.vocab_size == 257


def test_other_conversations_are_evaluated_and_predicted_as_a_whole(runs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} + 1 = ", "completion": str(i + 1)}) + "\n" for i in range(7)))
    ask = (f"resume={runs['chats']}", f"data.path={file}")
    assert execute("mode=evaluate", "mode.answers=null", *ask) == 0
    measured = json.loads((runs["chats"] / "evaluate_val.json").read_text())
    assert measured["whole"] == ["data"]
    assert execute("mode=predict", *ask) == 0
    assert len((runs["chats"] / "predictions_val.jsonl").read_text().splitlines()) == measured["samples"]
