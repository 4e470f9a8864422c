"""Which tokens carry loss: by hand, by blocks, and as TRL has them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import BRACKETS, CHATML, CHATS, TEMPLATES, WITH_BLOCKS, chat_tokenizer, messages_of

from recipes.data.conversations.chat_template import ChatTemplate, find_template
from recipes.data.conversations.conversation import Example
from recipes.data.conversations.loss_mask import ExampleTokenizer, Tokenized
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


def mask(
    template: str | ChatTemplate,
    messages: list[dict[str, Any]],
    *,
    train_on: Any = "answers",
    tools: list[Any] | None = None,
    without_loss: frozenset[int] = frozenset(),
) -> Tokenized:
    """Tokenize a conversation with a template."""
    template = ChatTemplate(template, "a test") if isinstance(template, str) else template
    example = Example(place="a.jsonl:1", prompt=None, answer=messages, tools=tools, without_loss=without_loss)
    return ExampleTokenizer(chat_tokenizer(), template, train_on=train_on)(example)


def spell(found: Tokenized) -> str:
    """Return the text that carries loss."""
    return chat_tokenizer().decode(found.tokens[found.carries_loss].tolist())


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
    assert mask(template, messages_of(CHATS[1]), train_on=train_on).ends is is_covered


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
    assert "a.jsonl:1: data.chat_template of a test" in caught.value.setting
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
        special_ids: frozenset[int] = frozenset()
        end_ids: list[int] = []

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


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLING = [
    {"role": "user", "content": "Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": 'it is "sunny"'},
    {"role": "assistant", "content": "Sunny."},
]
_SHOWS_TOOLS = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}"
_CALLS = "{%- for call in m['tool_calls'] or [] -%}{{ call.function.name + ARGUMENTS }}{%- endfor -%}"


def with_calls(arguments: str) -> str:
    """Return a template that shows tools, and calls with arguments as Jinja spells them."""
    shown = _CALLS.replace("ARGUMENTS", arguments.replace("ARG", "call.function.arguments"))
    return _SHOWS_TOOLS + CHATML.replace("m['content'] + '", "m['content'] }}" + shown + "{{ '")


@pytest.mark.parametrize("train_on", ["answers", "all"])
@pytest.mark.parametrize("arguments", ["(ARG | tojson)", "ARG", "('' ~ ARG)"], ids=["objects", "text", "spelled"])
def test_the_arguments_of_a_call_are_json_once_whatever_a_template_expects(arguments: str, train_on: Any) -> None:
    found = mask(with_calls(arguments), CALLING, tools=TOOLS, train_on=train_on)
    assert 'weather{"city": "Paris"}<|im_end|>' in spell(found)
    assert (found.ends, found.hidden) == (True, ())


@pytest.mark.parametrize("train_on", ["answers", "all"])
@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, CALLING, "does not show a call of weather: an empty one would be learned"),
        (with_calls("''"), CALLING, "does not show a call of weather with its arguments"),
        (with_calls("(ARG | tojson)").removeprefix(_SHOWS_TOOLS), CALLING, "shows no tools"),
        ("", messages_of(CHATS[0]), "does not show the answer '2'"),
        ("{# nothing #}", messages_of(CHATS[0]), "does not show the answer '2'"),
        (
            CHATML.replace("m['content']", "m['contnet'] | default('')"),
            messages_of(CHATS[1]),
            "show the answer '(Bis bald|Hallo)",
        ),
    ],
)
def test_a_template_that_does_not_show_what_is_learned_is_refused(
    template: str, messages: list[dict[str, Any]], reason: str, train_on: Any
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        mask(template, messages, tools=TOOLS if messages is CALLING else None, train_on=train_on)
    uses_tools = messages is CALLING
    advice = (
        "data.chat_template=<file.jinja> of a model that calls tools"
        if uses_tools
        else "data.chat_template=chatml, or data.chat_template="
    )
    assert caught.value.fix.startswith(advice)


def test_what_a_template_does_not_show_beside_answers_is_named() -> None:
    only_talk = CHATML.replace("for m in messages", "for m in messages if m['role'] in ['user', 'assistant']")
    chat = [{"role": "system", "content": "Be brief."}, *messages_of(CHATS[0])]
    assert mask(only_talk, chat).hidden == ("content of system messages",)
    chat[-1] = {**chat[-1], "reasoning_content": "One and one.", "tool_call_id": "1", "mood": "good"}
    assert mask(CHATML, chat).hidden == ("reasoning_content of messages", "mood of messages")
    thinking = CHATML.replace("m['content']", "(m['reasoning_content'] or '') + m['content']")
    for name in ("reasoning_content", "reasoning", "thinking"):  # transformers gives them each other's names
        answered = [chat[1], {"role": "assistant", "content": "2", name: "One and one."}]
        assert mask(thinking, answered).hidden == ()
        assert spell(mask(thinking, answered)).startswith("One and one.2")


def test_a_message_without_loss_is_in_the_text_alone() -> None:
    messages = messages_of(CHATS[1])
    for template in (CHATML, WITH_BLOCKS):
        assert spell(mask(template, messages, without_loss=frozenset({1}))).rstrip() == "Bis bald <3<|im_end|>"
        everything = spell(mask(template, messages, without_loss=frozenset({1}), train_on="all"))
        assert "Hallo" not in everything
        assert "Grüße" in everything
        none = mask(template, messages, without_loss=frozenset({1, 3}))
        assert not none.carries_loss.any()
        assert not mask(template, messages, without_loss=frozenset({3}), train_on="last_answer").carries_loss.any()


# as of Phi-3: the end of a text follows the last turn only
_ENDS_ONCE = CHATML + "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}"


def test_an_end_of_text_after_the_last_turn_is_learned_there() -> None:
    assert spell(mask(_ENDS_ONCE, messages_of(CHATS[1]))) == "Hallo.\n\nDu.<|im_end|>\nBis bald <3<|im_end|>\n</s>"


def test_several_blocks_of_an_answer_are_all_learned() -> None:
    end = "{% generation %}{{ eos_token }}{% endgeneration %}"
    ends_in_a_block = WITH_BLOCKS + "{%- if not add_generation_prompt -%}" + end + "{%- endif -%}"
    assert spell(mask(ends_in_a_block, messages_of(CHATS[1]))).endswith("Bis bald <3<|im_end|></s>")
    last = mask(ends_in_a_block, messages_of(CHATS[1]), train_on="last_answer")
    assert spell(last) == "Bis bald <3<|im_end|></s>"
    thinks = "{% generation %}{{ m['reasoning'] }}{% endgeneration %}{{ ' ' }}{% generation %}{{ m['content']"
    in_two = WITH_BLOCKS.replace("{% generation %}{{ m['content']", thinks)
    chat = [{**message, "reasoning": f"{i}!"} for i, message in enumerate(messages_of(CHATS[1]))]
    assert spell(mask(in_two, chat)) == "1!Hallo.\n\nDu.<|im_end|>3!Bis bald <3<|im_end|>"
    assert spell(mask(in_two, chat, train_on="last_answer")) == "3!Bis bald <3<|im_end|>"


# as of DeepSeek and Nemotron: the prompt begins a reasoning that answers without one do not have
@pytest.mark.parametrize(("prompt", "answer"), [("<|user|>\\n", ""), ("<|user|>\\n", "<|user|><|assistant|>")])
def test_of_a_prompt_for_reasoning_that_an_answer_lacks_the_rest_is_given(prompt: str, answer: str) -> None:
    template = CHATML.replace("assistant\\n' }}{%- endif", f"assistant\\n{prompt}' }}}}{{%- endif").replace(
        "m['content']", f"('{answer}' if m['role'] == 'assistant' else '') + m['content']"
    )
    learned = answer.removeprefix("<|user|>")
    assert spell(mask(template, messages_of(CHATS[0]))) == f"{learned}2<|im_end|>\n"


@pytest.mark.parametrize(
    "first",
    [
        "{%- if messages[0]['role'] == 'system' -%}{{ '!' }}{%- endif -%}",
        "{%- if messages -%}{{ bos_token }}{%- endif -%}",
    ],
)
@pytest.mark.parametrize("text", ["Hello", "0 or 1?"])
def test_an_answer_before_any_question_is_learned(first: str, text: str) -> None:
    greeted = [{"role": "assistant", "content": text}, *messages_of(CHATS[0])]
    assert spell(mask(first + CHATML, greeted)) == f"{text}<|im_end|>\n2<|im_end|>\n"


@pytest.mark.parametrize("messages", [[], messages_of(CHATS[0])[:1]])
def test_a_conversation_without_an_answer_is_not_rendered(messages: list[dict[str, Any]]) -> None:
    assert not mask("{{ 1 // 0 }}", messages).carries_loss.any()
    assert not mask("{{ 1 // 0 }}", [], train_on="all").carries_loss.any()


_OTHER_PROMPT = CHATML.replace("{{ '<|im_start|>assistant\\n' }}{%- endif", "{{ 'go' }}{%- endif")


@pytest.mark.parametrize(
    ("template", "train_on", "ways"),
    [
        # earlier answers are rendered without what the last one has, as of Qwen 3
        (CHATML.replace("m['content']", "('x' if loop.last and m['role'] == 'assistant' else '') + m['content']"),
         "answers", "data.train_on=last_answer, or data.train_on=all"),
        # the prompt is another one than that of an answer
        (_OTHER_PROMPT, "answers", "data.train_on=all"),
        # all but the last message, and a part of it, are not in the text
        ("{% set m = messages[-1] %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
         "{% if add_generation_prompt %}<assistant>{% endif %}", "answers", None),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content[:1] }}{{ eos_token }}"
         "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}", "answers", None),
        (_OTHER_PROMPT, "last_answer", "data.train_on=all"),
    ],
)  # fmt: skip
def test_what_is_advised_for_a_template_has_been_tried(template: str, train_on: Any, ways: str | None) -> None:
    messages = messages_of(CHATS[1])
    with pytest.raises(ConfigError, match="answers cannot be found") as caught:
        mask(template, messages, train_on=train_on)
    fix = "data.chat_template=<file.jinja> with {% generation %} around answers"
    assert caught.value.fix == (fix if ways is None else f"{fix}, or {ways}")
    for way in re.findall(r"train_on=(\w+)", caught.value.fix):
        assert mask(template, messages, train_on=way).carries_loss.any()


def test_the_template_for_tools_is_taken_where_there_are_tools_as_in_transformers() -> None:
    template = ChatTemplate("{{ 'none ' }}" + CHATML, "a test", tool_source=with_calls("(ARG | tojson)"))
    found = mask(template, CALLING, tools=TOOLS)
    assert chat_tokenizer().decode(found.tokens.tolist()).startswith('[{"type": "function"')
    assert (
        chat_tokenizer().decode(mask(template, messages_of(CHATS[0])).tokens.tolist()).startswith("none <|im_start|>")
    )
