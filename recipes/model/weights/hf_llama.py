"""Llama in the format of `LlamaForCausalLM`, or with `qk_norm` in that of `Qwen3ForCausalLM`."""

from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from recipes.model.llama import Llama
from recipes.model.rope import LLAMA3_ROPE
from recipes.model.weights.hf_format import Entry, Format, HFConfig, Setting, whole_number

_IN_BLOCK = {  # our name -> published name, one to one
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.out": "mlp.down_proj",
}
# where Qwen3Config differs from LlamaConfig
_DEFAULTS_OF_QWEN3 = {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32}
_DEFAULTS = {  # transformers' LlamaConfig
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": None,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
_KNOWN_ROPES = "default, or llama3 as Llama 3.1 to 3.3 use it"
_KEYS_OF_ROPE = {*LLAMA3_ROPE, "factor", "rope_theta", "type"}  # any other may change the frequencies


class LlamaFormat(Format):
    """The published form of a `Llama`; see `hf_format.Format`."""

    kinds: ClassVar[tuple[str, ...]] = ("llama", "qwen3")
    outside: ClassVar[dict[str, str]] = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    blocks: ClassVar[str] = "model.layers"

    def __init__(self, model: Llama) -> None:
        self.model: Llama = model

    @override
    def block_entry(self, name: str, inner: str, *, parameter: nn.Parameter, block: str) -> Entry:
        if inner == "attention.qkv":
            model = self.model
            heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
            published = tuple(f"{block}.self_attn.{letter}_proj.weight" for letter in "qkv")
            return Entry(name, published, tuple(num_heads * model.head_dim for num_heads in heads))
        return Entry(name, (f"{block}.{_IN_BLOCK[inner]}.weight",), (parameter.shape[0],))

    def settings(self, config: HFConfig) -> list[Setting]:
        """Return the values that a completed config.json must contain."""
        model = self.model
        longest = max(model.max_seq_len, config["max_position_embeddings"])  # a shorter context is fine
        return [
            Setting("qk_norm", model.qk_norm, "model.qk_norm"),
            Setting("vocab_size", model.vocab_size, "model.vocab_size"),
            Setting("max_position_embeddings", longest, "model.max_seq_len"),
            Setting("num_hidden_layers", model.num_layers, "model.num_layers"),
            Setting("num_attention_heads", model.num_heads, "model.num_heads"),
            Setting("num_key_value_heads", model.num_kv_heads, "model.num_kv_heads"),
            Setting("hidden_size", model.hidden_size, "model.hidden_size"),
            Setting("intermediate_size", model.ffn_hidden_size, "model.ffn_hidden_size"),
            Setting("head_dim", model.head_dim, "model.head_dim"),
            Setting("rms_norm_eps", model.rms_eps, "model.rms_eps"),
            Setting("tie_word_embeddings", model.tie_embeddings, "model.tie_embeddings"),
            Setting("rope_theta", model.rope_theta, "model.rope_theta"),
            Setting("rope_factor", model.rope_scaling_factor, "model.rope_scaling_factor", is_optional=True),
            Setting("rope_type", _KNOWN_ROPES, None),
            Setting("attention_bias", False, None),
            Setting("mlp_bias", False, None),
            Setting("hidden_act", "silu", None),
            Setting("use_sliding_window", False, None),
        ]

    def with_defaults(self, config: HFConfig) -> HFConfig:
        """Return `config` with transformers' defaults for missing keys.

        Adds qk_norm, rope_type and rope_factor, which `settings` compares.
        """
        full = {**_DEFAULTS, **(_DEFAULTS_OF_QWEN3 if config.get("model_type") == "qwen3" else {}), **config}
        num_heads = whole_number(full, "num_attention_heads")
        if full["num_key_value_heads"] is None:
            full["num_key_value_heads"] = num_heads
        if num_heads % whole_number(full, "num_key_value_heads"):
            raise ValueError(f"num_key_value_heads={full['num_key_value_heads']} does not divide {num_heads} heads")
        if full["head_dim"] is None:
            hidden_size = whole_number(full, "hidden_size")
            if hidden_size % num_heads:
                raise ValueError(f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}")
            full["head_dim"] = hidden_size // num_heads
        whole_number(full, "max_position_embeddings")
        full["qk_norm"] = full["model_type"] == "qwen3"
        # transformers 5 stores theta and scaling in `rope_parameters`; earlier versions used two keys, and the second,
        # `rope_scaling`, originally had `type` instead of `rope_type`
        scaling = full["rope_parameters"] or full["rope_scaling"] or {}
        rope = {"type": "default", **scaling}
        rope = {"rope_type": rope["type"], **rope}
        if "rope_theta" in rope:
            full["rope_theta"] = rope["rope_theta"]
        llama3 = all(key in rope and rope[key] == value for key, value in LLAMA3_ROPE.items())
        full["rope_factor"] = rope["factor"] if llama3 else None
        unread = sorted(name for name in rope.keys() - _KEYS_OF_ROPE if rope[name] not in (None, 1, 1.0))
        known = (llama3 or rope["rope_type"] == "default") and not unread
        full["rope_type"] = _KNOWN_ROPES if known else ", ".join([str(rope["rope_type"]), *unread])
        return full

    def full_name(self, name: str) -> str | None:
        """Add the prefix that files of a model without its head lack: `norm.weight` becomes `model.norm.weight`.

        None for saved rotary frequencies or the copy of a tied head.
        """
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.model.tie_embeddings):
            return None
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

    def config(self) -> dict[str, Any]:
        """Return config.json for transformers 4 and 5, without dtype and special tokens."""
        model = self.model
        factor = model.rope_scaling_factor
        return {
            "architectures": ["Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM"],
            "model_type": "qwen3" if model.qk_norm else "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "max_position_embeddings": model.max_seq_len,
            "num_attention_heads": model.num_heads,
            "num_hidden_layers": model.num_layers,
            "num_key_value_heads": model.num_kv_heads,
            "rms_norm_eps": model.rms_eps,
            "rope_scaling": None if factor is None else {**LLAMA3_ROPE, "factor": factor},
            "rope_theta": model.rope_theta,
            "tie_word_embeddings": model.tie_embeddings,
            "vocab_size": model.vocab_size,
        }
