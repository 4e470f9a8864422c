"""Nano models of every family with tokenizers of every kind, as a publisher would leave them in a folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from chats import CHATML
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import nn

from recipes.adapter.ia3 import IA3
from recipes.adapter.lora import Lora
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import HuggingFace
from recipes.model.llama import Llama
from recipes.model.moe import DeepSeekV3, MoeLlama
from recipes.model.weights import initialize
from recipes.tokenizer import NUM_BYTES, byte_alphabet

WINDOW = 96
ENDS = ("</s>", "<|im_end|>")
_SPECIAL = ("<unk>", "<s>", *ENDS, "<|im_start|>")
_MERGES = ("t h", "th e", "l o", "s s", "lo ss", "i n", "e r", "a n")
OWN = ("gpt2", "llama", "tied llama", "qwen3", "mixtral", "deepseek")
PUBLISHED = ("any llama", "any qwen2")
_LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": "all", "use_rslora": False}
_LORA |= {"modules_to_save": []}
ADAPTERS: dict[str, Any] = {
    "lora": lambda: Lora(**_LORA, use_dora=False),
    "dora": lambda: Lora(**_LORA, use_dora=True),
    "ia3": lambda: IA3(target_modules="all", feedforward_modules=["down_proj"], modules_to_save=[]),
    "qlora": lambda: Lora(**_LORA, use_dora=False, quantization="nf4"),
}


@dataclass(frozen=True)
class Kind:
    """A published model and what is trained beside it.

    Attributes:
        family: One of `OWN` and `PUBLISHED`.
        adapter: One of `ADAPTERS`; None: all weights.
        is_separate: Whether the adapter is exported for peft.
    """

    family: str
    adapter: str | None = None
    is_separate: bool = False

    def __str__(self) -> str:
        parts = [self.family, self.adapter or "", "for peft" if self.is_separate else ""]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Text:
    """What differs between the tokenizers of published models."""

    is_like_sentencepiece: bool
    has_start: bool
    has_several_ends: bool
    has_template: bool
    has_start_first: bool = False  # the start has the lowest id of the special tokens, as in Llama 3

    def __str__(self) -> str:
        names = ("sentencepiece" if self.is_like_sentencepiece else "bytes", "start" if self.has_start else "")
        more = ("ends" if self.has_several_ends else "end", "template" if self.has_template else "")
        return " ".join(filter(None, (*names, *more, "start first" if self.has_start_first else "")))


def make_backend(text: Text) -> Backend:
    """Return a byte-level vocabulary, or one with the blank before a word, a byte for what is unknown, and `Strip`."""
    merges = [tuple(merge.split()) for merge in _MERGES]
    if text.is_like_sentencepiece:
        letters = ["▁", *map(chr, range(33, 127))]
        pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES)), *letters, *(a + b for a, b in merges)]
        vocab = {piece: id for id, piece in enumerate(dict.fromkeys([*pieces, "▁the"]))}
        backend = Backend(
            models.BPE(vocab, [*merges, ("▁", "the")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        )
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    else:
        special = sorted(_SPECIAL, key=lambda token: token != "<s>") if text.has_start_first else _SPECIAL
        pieces = [*byte_alphabet(), *(a + b for a, b in merges), *special]
        backend = Backend(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    if text.has_start:
        start = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[start]
        )
    return backend


def publish_text(text: Text, folder: Path) -> Backend:
    """Write the tokenizer and the settings of generation of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = make_backend(text)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"bos_token": "<s>", "clean_up_tokenization_spaces": True} if text.has_start else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if text.has_template:
        (folder / "chat_template.jinja").write_text(CHATML)
    ends: Any = backend.token_to_id("</s>")
    if text.has_several_ends:
        ends = [ends, backend.token_to_id("<|im_end|>")]
        (folder / "LICENSE").write_text("for anybody")
    generation = {"eos_token_id": ends, "max_new_tokens": 7} | ({"pad_token_id": 0} if text.has_start else {})
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return backend


@torch.no_grad()
def scramble(model: nn.Module, *, only: str = "") -> None:
    """Set random values: each next token is another one, and the logits depend on all weights."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if only in name and parameter.dtype.is_floating_point:
            parameter.copy_(1.0 + 0.2 * noise if parameter.dim() == 1 or "ia3" in name else 0.2 * noise)


def make_model(kind: Kind, backend: Backend, folder: Path) -> Any:
    """Return a model with random weights; for `PUBLISHED` these are in the folder, and an adapter is beside them."""
    vocab_size = backend.get_vocab_size()
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_seq_len": WINDOW, "num_layers": 2, "num_heads": 4}
    if kind.family in PUBLISHED:
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "max_position_embeddings": WINDOW, "vocab_size": vocab_size}
        ids = {"bos_token_id": backend.token_to_id("<s>"), "eos_token_id": backend.token_to_id("</s>")}
        classes: Any = {"any llama": hf.LlamaConfig, "any qwen2": hf.Qwen2Config}
        config = classes[kind.family](**shape, **ids, tie_word_embeddings=kind.family == "any qwen2")
        theirs = hf.AutoModelForCausalLM.from_config(config)
        scramble(theirs)
        generation = (folder / "generation_config.json").read_bytes()
        theirs.save_pretrained(folder)
        (folder / "generation_config.json").write_bytes(generation)
        name = str(folder)
        with torch.device("meta"):
            model: Any = HuggingFace(name=name, pretrained=name, max_seq_len=WINDOW, vocab_size=vocab_size)
            if kind.adapter is not None:
                ADAPTERS[kind.adapter]().apply(model)
        model.to_empty(device="cpu")
        initialize(model, seed=0)
        for mark in ("lora_", "ia3_") if kind.adapter is not None else ():
            scramble(model, only=mark)
        return model.eval()
    sizes |= {"hidden_size": 32}
    heads: dict[str, Any] = {"num_kv_heads": 2, "ffn_hidden_size": 48, "rope_theta": 500.0}
    routed: dict[str, Any] = {"num_kv_heads": 2, "moe_intermediate_size": 48, "rope_theta": 500.0}
    routed |= {"num_experts": 4, "num_experts_per_tok": 2}
    latent = {"first_k_dense_replace": 1, "ffn_hidden_size": 40, "q_lora_rank": 16, "kv_lora_rank": 12}
    latent |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 2, "topk_group": 1}
    makers: dict[str, Any] = {
        "gpt2": lambda: GPT2(**sizes, dropout=0.0),
        "llama": lambda: Llama(**sizes, **heads),
        "tied llama": lambda: Llama(**sizes, **heads, tie_embeddings=True),
        "qwen3": lambda: Llama(**sizes, **heads, qk_norm=True),
        "mixtral": lambda: MoeLlama(**sizes, **routed),
        "deepseek": lambda: DeepSeekV3(
            **sizes, **routed | {"num_kv_heads": 4}, **latent, num_shared_experts=1, scoring_func="sigmoid"
        ),
    }
    with torch.device("meta"):
        model = makers[kind.family]()
    model.to_empty(device="cpu")
    model.init_weights(0)
    scramble(model)
    with torch.no_grad():
        model.embedding.weight[vocab_size:] = 0.0
        if hasattr(model, "head"):
            model.head.weight[vocab_size:] = 0.0
    return model.eval()
