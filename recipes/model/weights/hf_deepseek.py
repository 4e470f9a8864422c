"""DeepSeek-V3 in the format of `DeepseekV3ForCausalLM`, which stores each matrix of each expert separately."""

from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.moe.deepseek import DeepSeekV3
from recipes.model.weights.hf_format import Entry, HFConfig, Setting
from recipes.model.weights.hf_llama import LlamaFormat

_IN_BLOCK = {  # our name -> published name, one to one
    "attention_norm": "input_layernorm",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_norm": "self_attn.kv_a_layernorm",
    "attention.key_value": "self_attn.kv_b_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.out": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.out": "mlp.shared_experts.down_proj",
}
_OF_EXPERTS = {"mlp.experts.gate": "gate_proj", "mlp.experts.up": "up_proj", "mlp.experts.out": "down_proj"}
_MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts")
_BIAS = "mlp.gate.e_score_correction_bias"
_DEFAULTS = {  # transformers' DeepseekV3Config
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_local_experts": None,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "v_head_dim": 128,
}


class DeepSeekV3Format(LlamaFormat):
    """The published form of a `DeepSeekV3`; see `hf_format.Format`."""

    kinds: ClassVar[tuple[str, ...]] = ("deepseek_v3",)

    def __init__(self, model: DeepSeekV3) -> None:
        super().__init__(model)
        self.moe = model

    @override
    def entries(self) -> list[Entry]:
        """Return every parameter, a tied head once, and the expert load-balancing biases."""
        model, first = self.moe, self.moe.first_k_dense_replace
        biases = [
            Entry(f"blocks.{index}.mlp.router.bias", (f"model.layers.{index}.{_BIAS}",), (model.num_experts,))
            for index in range(first, model.num_layers)
        ]
        return [*super().entries(), *biases]

    @override
    def block_entry(self, name: str, inner: str, *, parameter: nn.Parameter, block: str) -> Entry:
        if inner not in _OF_EXPERTS:
            of_query = "self_attn.q_proj" if self.moe.q_lora_rank is None else "self_attn.q_b_proj"
            published = of_query if inner == "attention.query" else _IN_BLOCK[inner]
            return Entry(name, (f"{block}.{published}.weight",), (parameter.shape[0],))
        experts = range(self.moe.num_experts)
        names = tuple(f"{block}.mlp.experts.{index}.{_OF_EXPERTS[inner]}.weight" for index in experts)
        num_rows = self.moe.hidden_size if inner.endswith("out") else self.moe.moe_intermediate_size
        return Entry(name, names, (num_rows,) * len(names), stacked=True)

    def _sizes(self) -> dict[str, tuple[str, Any]]:
        """Map each config.json key to our setting and its value."""
        model = self.moe
        sizes = {
            "first_k_dense_replace": "first_k_dense_replace",
            "kv_lora_rank": "kv_lora_rank",
            "moe_intermediate_size": "moe_intermediate_size",
            "n_group": "n_group",
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "renormalize_weights",
            "num_experts_per_tok": "num_experts_per_tok",
            "q_lora_rank": "q_lora_rank",
            "qk_nope_head_dim": "head_dim",
            "qk_rope_head_dim": "qk_rope_head_dim",
            "routed_scaling_factor": "routed_scaling_factor",
            "v_head_dim": "v_head_dim",
        }
        values = {key: (name, getattr(model, name)) for key, name in sizes.items()}
        groups = model.topk_group or model.n_group
        return values | {"topk_group": ("topk_group", groups)}

    @override
    def settings(self, config: HFConfig) -> list[Setting]:
        model = self.moe
        of_others = ("head_dim", "intermediate_size")
        width = model.ffn_hidden_size if model.first_k_dense_replace else config["intermediate_size"]
        return [
            *(setting for setting in super().settings(config) if setting.key not in of_others),
            Setting("intermediate_size", width, "model.ffn_hidden_size"),
            *(
                Setting(key, value, f"model.{name}", least=int(key not in _MAY_BE_ZERO), is_optional="q_lora" in key)
                for key, (name, value) in self._sizes().items()
            ),
            Setting("scoring_func", model.scoring_func, "model.scoring_func"),
            Setting("rope_interleave", True, None),
        ]

    @override
    def with_defaults(self, config: HFConfig) -> HFConfig:
        full = dict(super().with_defaults({**_DEFAULTS, **config}))
        if full["num_local_experts"] is not None:  # alias of the same setting
            full["n_routed_experts"] = full["num_local_experts"]
        return full

    @override
    def full_name(self, name: str) -> str | None:
        """Return the full name; None also for the multi-token prediction layer."""
        full = super().full_name(name)
        return None if full is not None and full.startswith(f"model.layers.{self.moe.num_layers}.") else full

    @override
    def config(self) -> dict[str, Any]:
        """Return config.json, without dtype and special tokens.

        Raises:
            ConfigError: The model differs from the DeepSeek-V3 architecture.
        """
        model = self.moe
        if model.scoring_func != "sigmoid":
            raise ConfigError(
                "mode=export",
                f"model.scoring_func={model.scoring_func} is not how a DeepSeek-V3 weighs its experts",
                "model.scoring_func=sigmoid for the run that is to be exported",
            )
        return super().config() | {
            **{key: value for key, (_, value) in self._sizes().items()},
            "architectures": ["DeepseekV3ForCausalLM"],
            "head_dim": model.qk_rope_head_dim,  # what transformers calls the rotary part of a head
            "intermediate_size": model.ffn_hidden_size,
            "model_type": "deepseek_v3",
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,
        }
