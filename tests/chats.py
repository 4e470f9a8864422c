"""Conversations, a byte-level tokenizer with turn tokens, and chat templates modeled on five published models."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from recipes.tokenizer import NUM_BYTES, Tokenizer, byte_alphabet

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>"]

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
HEADERS = """{{- bos_token }}{%- for m in messages -%}
{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""
BRACKETS = """{{- bos_token }}{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' -%}{{ ' ' + m['content'] + eos_token }}
{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}
{%- endfor -%}"""
TURNS = """{{- bos_token }}{%- for m in messages -%}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
TAGS = """{%- for m in messages -%}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"""
# CHATML with the assistant's output marked
WITH_BLOCKS = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "brackets": BRACKETS, "turns": TURNS, "tags": TAGS}

CHATS = [
    [("user", "1 + 1?"), ("assistant", "2")],
    [("user", " Grüße, 世界! "), ("assistant", "Hallo.\n\nDu."), ("user", "ok"), ("assistant", "Bis bald <3")],
]


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def make_backend() -> Backend:
    """Return a byte-level backend with special tokens that puts `<s>` before every text."""
    vocab = byte_alphabet() | {token: NUM_BYTES + i for i, token in enumerate(SPECIAL)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", NUM_BYTES)])
    return backend


def chat_tokenizer(template: str | None = None) -> Tokenizer:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    return Tokenizer(make_backend(), end_of_text=NUM_BYTES + 1, settings=settings)
