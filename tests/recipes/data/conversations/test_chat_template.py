"""Which template is taken, what it may cost, and where its turns end."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from chats import BRACKETS, CHATML, CHATS, TEMPLATES, WITH_BLOCKS, chat_tokenizer, make_backend, messages_of

from recipes.data.conversations.chat_template import (
    TRAINING_DAY,
    ChatTemplate,
    find_template,
    prompt_for_answer,
)
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer
from recipes.tokenizer.bytes import byte_tokenizer


def test_the_template_of_a_tokenizer_is_used_and_saved(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    assert find_template("auto", tokenizer) == ChatTemplate(CHATML, "the tokenizer")
    assert find_template("chatml", tokenizer).name == "chatml"
    (tmp_path / "mine.jinja").write_text(BRACKETS)
    assert find_template(str(tmp_path / "mine.jinja"), tokenizer).source == BRACKETS
    tokenizer.with_chat_template(BRACKETS).save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").chat_template == BRACKETS


def test_a_template_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="data.chat_template=alpaca: there is no such file"):
        find_template("alpaca", byte_tokenizer())


def test_a_name_that_none_of_several_templates_has_is_answered_with_theirs() -> None:
    tokenizer = chat_tokenizer([{"name": name, "template": CHATML} for name in ("default", "rag")])
    message = (
        "there is no such file, and the templates of the tokenizer are default, rag; type data.chat_template=rag, or"
    )
    with pytest.raises(ConfigError, match=message):
        find_template("rga", tokenizer)


def test_of_several_templates_the_default_is_used() -> None:
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": several}
    assert Tokenizer(make_backend(), end_of_text=257, settings=settings).chat_template == CHATML


def test_only_a_special_token_ends_an_answer() -> None:
    tokenizer = chat_tokenizer()
    assert tokenizer.find_end([*b"yes", 259, *b"\n"]) == 259
    assert tokenizer.find_end([*b"yes"]) is None
    asked, end = prompt_for_answer("hi", tokenizer.with_chat_template(CHATML))
    assert (tokenizer.decode(asked), end) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 259)
    endless = "{% for m in messages %}{{ m['content'] + '\\n' }}{% endfor %}"
    assert prompt_for_answer("hi", tokenizer.with_chat_template(endless))[1] is None


def render(template: str | ChatTemplate, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(template, "a test") if isinstance(template, str) else template
    options = {"adds_prompt": False, "tools": None} | options
    return template.render(messages_of(CHATS[1]) if messages is None else messages, chat_tokenizer(), **options)[0]


def tokenizer_with(templates: Any) -> Tokenizer:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": templates}
    return Tokenizer(make_backend(), end_of_text=257, settings=settings)


# beside the templates of chats.py: what published templates use of Jinja and of the functions of transformers
_SPELLINGS = [
    "{%- for m in messages -%}{%- if loop.first -%}{{ loop.length }}{%- endif -%}{{ loop.index0 ~ m.role }}"
    "{%- if not loop.last -%}{{ loop.nextitem.content | trim }}{%- endif -%}{%- endfor -%}",
    "{%- set ns = namespace(text='', n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
    "{%- set ns.text = ns.text + m['content'].split(' ')[-1] -%}{%- endfor -%}"
    "{{ ns.text }}{{ '%03d|%s' % (ns.n, 'x') }}",
    "{%- macro show(items, depth=0) -%}{%- for item in items -%}{{ ' ' * depth }}{{ item | tojson(indent=2) }}"
    "{%- endfor -%}{%- endmacro -%}{{ show(messages, depth=4) }}{{ show(tools or []) | indent(3) }}",
    "{%- set parts -%}{%- for m in messages -%}{{ m.content | upper }},{%- endfor -%}{%- endset -%}"
    "{{ parts | length }}{{ messages | map(attribute='role') | join(' > ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{%- for m in messages if m.role == 'user' -%}{%- for k, v in m | dictsort -%}{{ k }}={{ v }};{%- endfor -%}"
    "{%- else -%}none{%- endfor -%}{{ messages[::-1][0].content.replace(' ', '_') }}",
    "{{ '{}-{:>4}'.format('a', 'b') }}{{ ','.join(['a', 'b']) }}{{ dict(a=1) | tojson }}{{ [1, 2] + [3] }}",
    "{%- for i in range(3) -%}{%- if i == 1 -%}{%- continue -%}{%- endif -%}{{ i }}{{ 7 % 3 }}{{ 2 ** 5 }}"
    "{%- endfor -%}{{ 'ab' * 2 }}{{ strftime_now('%Y') | length }}{{ messages | string | length }}",
    "{%- for m in messages recursive -%}{{ m.role }}{{ loop(m.children) if m.children else '' }}{%- endfor -%}",
]


@pytest.mark.parametrize("template", [*TEMPLATES.values(), WITH_BLOCKS, *_SPELLINGS])
def test_a_template_is_rendered_as_transformers_renders_it(template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokenizer, tools = chat_tokenizer(), [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for chat, adds_prompt in ((0, False), (1, True)):
        messages: list[dict[str, Any]] = [{**m, "thinking": "é"} for m in messages_of(CHATS[chat])]
        options = {"add_generation_prompt": adds_prompt, "tools": tools} | tokenizer.special_tokens
        options["return_assistant_tokens_mask"] = template is WITH_BLOCKS
        [expected], spans = utils.render_jinja_template([messages], chat_template=template, **options)
        ours = ChatTemplate(template, "a test").render(messages, tokenizer, adds_prompt=adds_prompt, tools=tools)
        assert ours == (expected, spans[0] if spans else [])


_DEEP = "{%- set s = 'x' * 999 -%}" + "{%- set s = s ~ s -%}" * 60


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{%- macro f(n) -%}{%- if n -%}{{ f(n - 1) }}{{ f(n - 1) }}{%- endif -%}{%- endmacro -%}{{ f(60) }}",
        "{{ range(99999) | map('string') | map('length') | sum }}" * 9,
        "{{ 'x' * 10**12 }}",
        "{{ [0] * 10**11 }}",
        "{{ 10**12 * 'x' }}",
        "{{ 9 ** 999999 }}",
        "{{ 'x' * 1000000 }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x\n' | indent(10**10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format('x') }}",
        "{{ '{:>{}}'.format('x', 1000000000) }}",
        _DEEP,
        _DEEP.replace("s ~ s", "s + s"),
        "{%- set s = 'x' * 999 -%}" + "{%- set s -%}{{ s }}{{ s }}{%- endset -%}" * 60,
        "{%- set s = 'x' * 90000 -%}{{ s.replace('x', s) }}",
        "{%- set s = 'x' * 90000 -%}{{ s | replace('x', s) }}",
        "{%- set s = 'x' * 90000 -%}{{ s.join(s) }}",
        "{%- set s = 'x' * 90000 -%}{{ s | join(s) }}",
        "{%- set s = 'x' * 90000 -%}{{ ([s] * 90000) | join }}",
        "{{ lipsum(n=100000) }}",
        "{{ messages | random }}",
        "{%- macro f() -%}{{ f() }}{%- endmacro -%}{{ f() }}",
    ],
)
def test_a_template_that_would_not_end_or_fill_the_memory_is_refused(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.data.conversations import bounded_template

    monkeypatch.setattr(bounded_template, "_MAX_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="the template of a test (rejects it|is no valid Jinja)") as caught:
        render(template)
    assert caught.value.fix == "data.chat_template=chatml, or data.chat_template=<file.jinja>"


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(400)]
    assert len(render(CHATML, messages)) > 400_000
    assert len(render("{%- for m in messages -%}{{ m | tojson }}{%- endfor -%}", messages)) > 400_000


@pytest.mark.parametrize("escape", ["{{ strftime_now.__self__ }}", "{{ messages.__class__ }}", "{{ cycler.__init__ }}"])
def test_the_functions_of_a_template_lead_nowhere(escape: str) -> None:
    with pytest.raises(ConfigError, match="is unsafe|rejects it"):
        render(ChatTemplate(escape + "{{ (" + escape.strip("{} ") + ").x }}", "a test", day=TRAINING_DAY))


def test_the_date_of_training_data_is_not_that_of_the_day() -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    trained = find_template("auto", tokenizer_with(template), day=TRAINING_DAY)
    assert render(trained).startswith("26 Jul 2024<|im_start|>")
    today = {day.strftime("%d %b %Y") for day in (datetime.date.today(), datetime.date.today())}
    assert render(find_template("auto", tokenizer_with(template)))[:11] in today, "as in transformers"
    assert ChatTemplate(template, "").writes_date
    assert not ChatTemplate(CHATML, "").writes_date


def test_a_template_that_is_no_template_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match="the template of a test is no valid Jinja: .*, in line 2"):
        render("{{ messages }}\n{% for %}")
    with pytest.raises(ConfigError, match="includes, imports or extends another file.*; type data.chat_template=<file"):
        render("{% include 'other.jinja' %}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"root:x:0:0:root", "it has no {{ … }}: it is no chat template"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
        (b'{"chat_template": "{% for m in messages %}"}', "it is JSON, which may hold a template but is none"),
        (b"{{" + b"x" * 1024 * 1024, "no chat template is that long"),
    ],
)
def test_a_file_that_is_no_template_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        find_template(str(tmp_path / "t.jinja"), byte_tokenizer())
    assert reason in caught.value.reason
    assert caught.value.setting == f"data.chat_template={tmp_path / 't.jinja'}"


@pytest.mark.parametrize("name", ["~nouser/x.jinja", "x" * 300, "a\0b", "/dev/zero", "/"])
def test_a_name_that_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_template(name, byte_tokenizer())
    assert caught.value.setting == f"data.chat_template={name}"


def test_templates_with_names_are_found_by_them() -> None:
    tokenizer = tokenizer_with([{"name": "rag", "template": "r"}, {"name": "tool_use", "template": CHATML}])
    with pytest.raises(ConfigError, match="the templates rag, tool_use, and none of them is the default") as caught:
        find_template("auto", tokenizer)
    assert find_template(caught.value.fix.removeprefix("data.chat_template="), tokenizer).source == "r"
    several = tokenizer_with([{"name": "default", "template": "d"}, {"name": "tool_use", "template": CHATML}])
    assert find_template("auto", several) == ChatTemplate("d", "the tokenizer", tool_source=CHATML)
