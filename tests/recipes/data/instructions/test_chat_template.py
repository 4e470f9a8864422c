"""Which tokens carry loss: by hand, by blocks, and as TRL has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import BRACKETS, CHATML, CHATS, TEMPLATES, WITH_BLOCKS, chat_tokenizer, make_backend, messages_of

from recipes.data.instructions.chat_template import (
    ChatTemplate,
    ExampleTokenizer,
    find_template,
    prompt_for_answer,
    trains_on_end,
)
from recipes.data.instructions.conversation import Example
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bytes import byte_tokenizer

BY_TRL = json.loads((Path(__file__).parent / "trl_labels.json").read_text(encoding="utf-8"))


def tokenize(
    template: str, messages: list[dict[str, Any]], *, num_prompt: int = 0, train_on: Any = "answers"
) -> tuple[list[int], list[bool]]:
    example = Example(place="a.jsonl:1", prompt=messages[:num_prompt] or None, answer=messages[num_prompt:])
    found = ExampleTokenizer(chat_tokenizer(), ChatTemplate(template, "a test"), train_on=train_on)(example)
    return found.tokens.tolist(), found.carries_loss.tolist()


def learned(tokens: list[int], carries_loss: list[bool], tokenizer: Tokenizer | None = None) -> str:
    """Return the text that carries loss."""
    tokenizer = tokenizer or chat_tokenizer()
    return tokenizer.decode([token for token, carries in zip(tokens, carries_loss, strict=True) if carries])


def labels(tokens: list[int], carries_loss: list[bool]) -> list[int]:
    return [token if carries else -100 for token, carries in zip(tokens, carries_loss, strict=True)]


@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_and_completion_have_the_labels_of_trl(name: str, chat: int) -> None:
    messages = messages_of(CHATS[chat])
    tokens, carries_loss = tokenize(TEMPLATES[name], messages, num_prompt=len(messages) - 1)
    assert tokens == BY_TRL[name][chat]["tokens"]
    assert labels(tokens, carries_loss) == BY_TRL[name][chat]["labels"]


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_blocks_have_the_labels_of_trl(chat: int) -> None:
    tokens, carries_loss = tokenize(WITH_BLOCKS, messages_of(CHATS[chat]))
    assert tokens == BY_TRL["blocks"][chat]["tokens"]
    assert labels(tokens, carries_loss) == BY_TRL["blocks"][chat]["labels"]


@pytest.mark.parametrize(("chat", "text"), [(0, "[INST]"), (1, "[INST]")])
def test_a_special_token_stands_once_at_the_beginning(chat: int, text: str) -> None:
    tokens, _ = tokenize(BRACKETS, messages_of(CHATS[chat]))
    assert tokens.count(256) == 1, "the template writes <s>, and the tokenizer adds none"
    assert chat_tokenizer().decode(tokens).startswith(f"<s>{text}")


@pytest.mark.parametrize("train_on", ["answers", "last_answer"])
@pytest.mark.parametrize(
    ("template", "is_covered"),
    [
        (CHATML, True),
        (WITH_BLOCKS, True),
        (WITH_BLOCKS.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"), False),
        # as of GLM-4: the next turn ends an answer
        ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}", False),
        *((template, True) for template in TEMPLATES.values()),
    ],
)
def test_a_template_whose_end_of_a_turn_carries_no_loss_is_recognized(
    template: str, is_covered: bool, train_on: Any
) -> None:
    assert trains_on_end(chat_tokenizer(), ChatTemplate(template, "a test"), train_on=train_on) is is_covered


def test_without_blocks_every_answer_and_its_end_carry_loss() -> None:
    found = learned(*tokenize(CHATML, messages_of(CHATS[1])))
    assert found == "Hallo.\n\nDu.<|im_end|>\nBis bald <3<|im_end|>\n"


def test_blocks_mark_answers_without_what_follows_them() -> None:
    found = learned(*tokenize(WITH_BLOCKS, messages_of(CHATS[1])))
    assert found == "Hallo.\n\nDu.<|im_end|>Bis bald <3<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, WITH_BLOCKS], ids=["by difference", "by blocks"])
def test_the_last_answer_alone_or_everything_carries_loss_by_choice(template: str) -> None:
    messages = messages_of(CHATS[1])
    assert learned(*tokenize(template, messages, train_on="last_answer")).rstrip() == "Bis bald <3<|im_end|>"
    assert all(tokenize(template, messages, train_on="all")[1])


def test_answers_in_a_prompt_carry_no_loss() -> None:
    messages = messages_of(CHATS[1])
    for template in (CHATML, WITH_BLOCKS):
        found = learned(*tokenize(template, messages, num_prompt=3))
        assert found.rstrip() == "Bis bald <3<|im_end|>"


def test_an_answer_that_changes_with_what_follows_is_refused() -> None:
    forgetful = CHATML.replace(
        "m['content']", "('forgotten' if m['role'] == 'assistant' and not loop.last else m['content'])"
    )
    with pytest.raises(ConfigError, match="answers cannot be found: what it renders for an answer depends") as caught:
        tokenize(forgetful, messages_of(CHATS[1]))
    assert "a.jsonl:1: data.template of a test" in caught.value.setting
    # the last answer is the same whatever follows, since nothing does
    assert "Bis bald" in learned(*tokenize(forgetful, messages_of(CHATS[1]), train_on="last_answer"))


def test_a_template_that_rejects_a_conversation_is_quoted() -> None:
    with pytest.raises(ConfigError, match="the template of a test rejects it: only user and assistant"):
        tokenize(BRACKETS, [{"role": "system", "content": "x"}, *messages_of(CHATS[0])])


def test_a_template_cannot_reach_beyond_its_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="rejects it"):
        tokenize(escape, messages_of(CHATS[0]))


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_the_template_of_the_project_teaches_answers_and_end_of_text_with_any_tokenizer(chat: int) -> None:
    for tokenizer in (byte_tokenizer(), chat_tokenizer()):
        template = find_template("auto", tokenizer)
        assert template.name == "chatml"
        assert template.marks_answers
        example = Example(place="", prompt=None, answer=messages_of(CHATS[chat]))
        found = ExampleTokenizer(tokenizer, template, train_on="answers")(example)
        end = tokenizer.special_tokens["eos_token"]
        answers = "".join(content + end for role, content in CHATS[chat] if role == "assistant")
        assert learned(found.tokens.tolist(), found.carries_loss.tolist(), tokenizer) == answers
        text = "".join(f"<|im_start|>{role}\n{content}{end}\n" for role, content in CHATS[chat])
        assert tokenizer.decode(found.tokens.tolist()) == text
        assert found.tokens.tolist().count(tokenizer.end_of_text) == len(CHATS[chat])


def test_the_template_of_a_tokenizer_is_used_and_saved(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    assert find_template("auto", tokenizer) == ChatTemplate(CHATML, "the tokenizer")
    assert find_template("chatml", tokenizer).name == "chatml"
    (tmp_path / "mine.jinja").write_text(BRACKETS)
    assert find_template(str(tmp_path / "mine.jinja"), tokenizer).source == BRACKETS
    tokenizer.with_chat_template(BRACKETS).save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").chat_template == BRACKETS


def test_a_template_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="data.template=alpaca: there is no such file"):
        find_template("alpaca", byte_tokenizer())


def test_of_several_templates_the_default_is_used() -> None:
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": several}
    assert Tokenizer(make_backend(), end_of_text=257, settings=settings).chat_template == CHATML


@pytest.mark.parametrize(("prompt", "start"), [("1 + 1 = ", 9), ("", 1), (None, 0)])
def test_of_plain_text_the_answer_and_end_of_text_carry_loss(prompt: str | None, start: int) -> None:
    example = Example(place="", prompt=prompt, answer="two")
    tokenizer = chat_tokenizer()
    found = ExampleTokenizer(tokenizer, ChatTemplate("", ""), train_on="answers")(example)
    assert found.tokens.tolist() == [256, *(f"{prompt or ''}two".encode()), 257], "<s>, the text, </s>"
    assert found.carries_loss.tolist() == [False] * start + [True] * (len(found.tokens) - start)


def test_the_seam_of_prompt_and_answer_is_that_of_generation() -> None:
    """A token across the seam would hide the end of the prompt from the model when it answers."""

    class Merging:
        end_of_text = 9
        first_tokens: list[int] = []

        def encode(self, text: str) -> list[int]:
            return [5] if text == "ab" else [1 if character == "a" else 2 for character in text]

    found = ExampleTokenizer(Merging(), ChatTemplate("", ""), train_on="answers")(  # type: ignore[arg-type]
        Example(place="", prompt="a", answer="b")
    )
    assert found.tokens.tolist() == [1, 2, 9]
    assert found.carries_loss.tolist() == [False, True, True]


OPEN_ENDED = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{%- else -%}{{ m['content'] }}{%- endif -%}{{ '\\n' }}{%- endfor -%}"
)


@pytest.mark.parametrize("answer", ["hi 😀", "é", "世"])
def test_an_answer_is_marked_to_the_last_byte_of_its_last_character(answer: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    assert learned(*tokenize(OPEN_ENDED, messages)) == answer


@pytest.mark.parametrize(
    "template",
    [
        "{%- macro show(m) -%}{{ m['role'] + ': ' }}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{%- endmacro -%}"
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{ show(m) }}{%- else -%}{{ m['content'] }}"
        "{%- endif -%}{%- endfor -%}",
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{%- set x -%}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{%- endset -%}{{ 'PREFIX ' + x }}{%- else -%}{{ m['content'] }}{%- endif -%}{%- endfor -%}",
    ],
    ids=["macro", "set"],
)
def test_a_block_whose_place_in_the_text_is_another_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="answers cannot be found: where it marks one there is"):
        tokenize(template, messages_of(CHATS[1]))


def test_chatml_refuses_what_it_cannot_show() -> None:
    source = find_template("chatml", byte_tokenizer()).source
    call = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    with pytest.raises(ConfigError, match="it shows no tool calls"):
        tokenize(source, call)
    example = Example(place="", prompt=None, answer=messages_of(CHATS[0]), tools=[{"type": "function"}])
    with pytest.raises(ConfigError, match="it shows no tools"):
        ExampleTokenizer(chat_tokenizer(), ChatTemplate(source, "chatml"), train_on="answers")(example)


def test_everything_can_be_learned_where_answers_cannot_be_found() -> None:
    only_last = WITH_BLOCKS.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")
    with pytest.raises(ConfigError, match="it marks 1 answers of 2"):
        tokenize(only_last, messages_of(CHATS[1]))
    assert all(tokenize(only_last, messages_of(CHATS[1]), train_on="all")[1])
    assert learned(*tokenize(only_last, messages_of(CHATS[1]), train_on="last_answer")).startswith("Bis bald")
    needs_a_first = "{{ messages[0].role }}" + CHATML
    greeted = [{"role": "assistant", "content": "Hello"}, *messages_of(CHATS[0])]
    assert all(tokenize(needs_a_first, greeted, train_on="all")[1])


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{%- macro f() -%}{{ f() }}{%- endmacro -%}{{ f() }}"])
def test_a_template_that_fails_is_one_sentence(template: str) -> None:
    with pytest.raises(ConfigError, match="the template of a test rejects it"):
        tokenize(template, messages_of(CHATS[0]))


def test_only_a_special_token_ends_an_answer() -> None:
    tokenizer = chat_tokenizer()
    assert tokenizer.find_end([*b"yes", 259, *b"\n"]) == 259
    assert tokenizer.find_end([*b"yes"]) is None
    asked, end = prompt_for_answer("hi", tokenizer.with_chat_template(CHATML))
    assert (tokenizer.decode(asked), end) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 259)
    assert prompt_for_answer("hi", tokenizer.with_chat_template(OPEN_ENDED))[1] is None
