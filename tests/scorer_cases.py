"""Two tiny language models with weights from a formula, and lm-evaluation-harness requests to compare."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import chat_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from recipes.evaluator.scorer import Scorer
from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained
from recipes.tokenizer import END_OF_TEXT, NUM_BYTES, Tokenizer, byte_alphabet

WINDOW = 48
# tokens across the boundary between context and continuation: a space and a letter, letters
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "a t", "Ġ c", "Ġc at", "o n", "s t"]
_LONG = "the cat sat on the mat, and then it sat in the sun on the hill; " * 3

SCORE_REQUESTS = [
    ("The cat", " sat"),
    ("The cat", " slept on the mat"),
    ("The cat ", "sat"),  # the space moves to the continuation
    ("The cat\n\n", "sat"),
    ("", "the cat"),  # after the start token
    ("", " the"),
    ("2 + 2 =", " 4"),
    ("2 + 2 =", " 5"),  # another choice with one token
    ("th", "e cat"),  # a token across the boundary; same input as another request, but with fewer tokens scored
    (_LONG, " the"),  # longer than the window
    (_LONG, " cat sat on the mat, and then"),
    (_LONG[: WINDOW // 2], _LONG[WINDOW // 2 : WINDOW]),
    ("Grüße", ", 世界"),
    ("a", "___"),  # the greedy answer of one model
    ("The cat", "\\A"),  # and of the other
]
ROLLING_TEXTS = ["the cat", _LONG, _LONG + "in the", "ü", "a" * (2 * WINDOW), "on the mat"]
GENERATE_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("The cat", {"until": ["\n"], "max_gen_toks": 12}),
    ("2 + 2 =", {"until": ["e", "a"], "max_gen_toks": 12}),
    (_LONG, {"until": [], "max_gen_toks": 12}),
    ("on the", {"until": "t", "max_gen_toks": 20, "do_sample": False}),
    ("a", {"until": [" c", "he"], "max_gen_toks": 30, "temperature": 0.0}),
    ("Grüße", {"until": ["</s>"], "max_new_tokens": 30}),
]


@dataclass(frozen=True)
class Case:
    """A model and its tokenizer."""

    model: Any
    tokenizer: Tokenizer

    def scorer(self, *, batch_size: int) -> Scorer:
        return Scorer(self.model, self.tokenizer, batch_size=batch_size, forward_context=contextlib.nullcontext)

    def export(self, folder: Path) -> None:
        self.tokenizer.save(folder / "tokenizer")
        export_pretrained(self.model, folder / "model", tokenizer_folder=folder / "tokenizer")


def _merging_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with some merges and end-of-text."""
    pairs = [(first, second) for first, second in (merge.split() for merge in MERGES)]
    vocab = byte_alphabet() | {END_OF_TEXT: NUM_BYTES}
    vocab |= {first + second: NUM_BYTES + 1 + i for i, (first, second) in enumerate(pairs)}
    backend = Backend(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend, end_of_text=NUM_BYTES)


def make_case(name: str) -> Case:
    """Return `gpt2`, with a padded vocabulary, or `llama`, whose tokenizer puts `<s>` before every text."""
    tokenizer = _merging_tokenizer() if name == "gpt2" else chat_tokenizer()
    shape: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "max_seq_len": WINDOW, "num_layers": 2}
    shape |= {"num_heads": 2, "hidden_size": 32}
    with torch.device("meta"):
        model: Any = (
            GPT2(**shape, dropout=0.0)
            if name == "gpt2"
            else Llama(**shape, num_kv_heads=1, ffn_hidden_size=64, rope_theta=10_000.0)
        )
    model.to_empty(device="cpu")
    initialize(model, 0)
    # NumPy guarantees these values in every version. They are large: rounding would decide between near ties
    random = np.random.RandomState(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                values = random.standard_normal(tuple(parameter.shape)).astype(np.float32)
                parameter.copy_(torch.from_numpy(values) * 0.3)
        model.embedding.weight[tokenizer.vocab_size :] = 0.0
    return Case(model.eval(), tokenizer)
