"""GPT-2 in the format of `GPT2LMHeadModel`, which stores transposed matrices (Conv1D)."""

import re
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from recipes.model.gpt2 import GPT2
from recipes.model.weights.hf_format import Entry, Format, HFConfig, Setting, whole_number

# within block i: our name -> published name; matrices are transposed
_IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.out": "mlp.c_proj",
}
_MASKS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")  # old files contain the causal mask
_DEFAULTS = {  # transformers' GPT2Config
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


class GPT2Format(Format):
    """The published form of a `GPT2`; see `hf_format.Format`."""

    kinds: ClassVar[tuple[str, ...]] = ("gpt2",)
    outside: ClassVar[dict[str, str]] = {
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    blocks: ClassVar[str] = "transformer.h"

    def __init__(self, model: GPT2) -> None:
        self.model: GPT2 = model

    @override
    def block_entry(self, name: str, inner: str, *, parameter: nn.Parameter, block: str) -> Entry:
        published = f"{block}.{_IN_BLOCK[inner]}.{name.rpartition('.')[2]}"
        return Entry(name, (published,), (parameter.shape[0],), transposed=parameter.dim() == 2)

    def settings(self, config: HFConfig) -> list[Setting]:
        """Return the values that a completed config.json must contain."""
        model = self.model
        tanh = ("gelu_new", "gelu_pytorch_tanh")  # two names for the same function
        activation = config["activation_function"]
        return [
            Setting("vocab_size", model.vocab_size, "model.vocab_size"),
            Setting("n_positions", model.max_seq_len, "model.max_seq_len"),
            Setting("n_layer", model.num_layers, "model.num_layers"),
            Setting("n_head", model.num_heads, "model.num_heads"),
            Setting("n_embd", model.hidden_size, "model.hidden_size"),
            Setting("tie_word_embeddings", model.tie_embeddings, "model.tie_embeddings"),
            Setting("n_inner", None if config["n_inner"] is None else 4 * model.hidden_size, None),
            Setting("activation_function", activation if activation in tanh else tanh[0], None),
            Setting("layer_norm_epsilon", model.norm.eps, None),
            Setting("scale_attn_by_inverse_layer_idx", False, None),
            Setting("scale_attn_weights", True, None),
        ]

    def with_defaults(self, config: HFConfig) -> HFConfig:
        """Return `config` with transformers' defaults for missing keys."""
        full = {**_DEFAULTS, **config}
        if whole_number(full, "n_embd") % whole_number(full, "n_head"):
            raise ValueError(f"n_head={full['n_head']} does not divide n_embd={full['n_embd']}")
        return full

    def full_name(self, name: str) -> str | None:
        """Add the prefix that the oldest files lack: `h.0.ln_1.weight` becomes `transformer.h.0.ln_1.weight`.

        None for a saved mask or the copy of a tied head.
        """
        if name == "lm_head.weight":
            return None if self.model.tie_embeddings else name
        full = name if name.startswith("transformer.") else f"transformer.{name}"
        return None if _MASKS.fullmatch(full) else full

    def config(self) -> dict[str, Any]:
        """Return config.json, without dtype and special tokens."""
        model = self.model
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": model.dropout.p,
            "embd_pdrop": model.dropout.p,
            "resid_pdrop": model.dropout.p,
            "layer_norm_epsilon": model.norm.eps,
            "n_embd": model.hidden_size,
            "n_head": model.num_heads,
            "n_layer": model.num_layers,
            "n_positions": model.max_seq_len,
            "tie_word_embeddings": model.tie_embeddings,
            "vocab_size": model.vocab_size,
        }
