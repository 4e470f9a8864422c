"""Llama with experts in the format of `MixtralForCausalLM`, which stores each matrix of each expert separately."""

from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.moe.llama import MoeLlama
from recipes.model.weights.hf_format import Entry, HFConfig, Setting
from recipes.model.weights.hf_llama import LlamaFormat

_OF_EXPERTS = {"mlp.experts.gate": "w1", "mlp.experts.up": "w3", "mlp.experts.out": "w2"}
_OF_OTHERS = {"routed_scaling_factor": 1.0, "n_group": 1, "num_shared_experts": 0, "first_k_dense_replace": 0}
_DEFAULTS = {  # transformers' MixtralConfig, where it differs from LlamaConfig
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}


class MixtralFormat(LlamaFormat):
    """The published form of a `MoeLlama`; see `hf_format.Format`."""

    kinds: ClassVar[tuple[str, ...]] = ("mixtral",)

    def __init__(self, model: MoeLlama) -> None:
        super().__init__(model)
        self.moe = model

    @override
    def block_entry(self, name: str, inner: str, *, parameter: nn.Parameter, block: str) -> Entry:
        if inner == "mlp.router":
            return Entry(name, (f"{block}.block_sparse_moe.gate.weight",), (parameter.shape[0],))
        if inner not in _OF_EXPERTS:
            return super().block_entry(name, inner, parameter=parameter, block=block)
        experts = f"{block}.block_sparse_moe.experts"
        published = tuple(f"{experts}.{index}.{_OF_EXPERTS[inner]}.weight" for index in range(self.moe.num_experts))
        num_rows = self.moe.hidden_size if inner.endswith("out") else self.moe.moe_intermediate_size
        return Entry(name, published, (num_rows,) * len(published), stacked=True)

    @override
    def settings(self, config: HFConfig) -> list[Setting]:
        model = self.moe
        return [
            *(setting for setting in super().settings(config) if setting.key != "intermediate_size"),
            Setting("intermediate_size", model.moe_intermediate_size, "model.moe_intermediate_size"),
            Setting("num_local_experts", model.num_experts, "model.num_experts"),
            Setting("num_experts_per_tok", model.num_experts_per_tok, "model.num_experts_per_tok"),
            Setting("scoring_func", model.scoring_func, "model.scoring_func"),
            Setting("renormalize_weights", model.renormalize_weights, "model.renormalize_weights"),
            Setting("sliding_window", None, None),
            *(Setting(name, getattr(model, name), f"model.{name}") for name in _OF_OTHERS),
        ]

    @override
    def with_defaults(self, config: HFConfig) -> HFConfig:
        full = super().with_defaults({**_DEFAULTS, **config})
        return {**full, **_OF_OTHERS, "scoring_func": "softmax", "renormalize_weights": True}

    @override
    def config(self) -> dict[str, Any]:
        """Return config.json, without dtype and special tokens.

        Raises:
            ConfigError: The model differs from the Mixtral architecture.
        """
        _check_routing(self.moe)
        return super().config() | {
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": self.moe.moe_intermediate_size,
            "model_type": "mixtral",
            "num_experts_per_tok": self.moe.num_experts_per_tok,
            "num_local_experts": self.moe.num_experts,
            "output_router_logits": False,
            "router_aux_loss_coef": self.moe.router_aux_loss_coef,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        }


def _check_routing(model: MoeLlama) -> None:
    """Reject a model that does not route like Mixtral."""
    if model.scoring_func != "softmax" or not model.renormalize_weights:
        raise ConfigError(
            "mode=export",
            f"model.scoring_func={model.scoring_func} model.renormalize_weights={model.renormalize_weights} is not"
            " how a Mixtral weighs its experts",
            "model.scoring_func=softmax model.renormalize_weights=true for the run that is to be exported",
        )
    for name, plain in _OF_OTHERS.items():
        if getattr(model, name) != plain:
            raise ConfigError(
                "mode=export",
                f"model.{name}={getattr(model, name)} has no counterpart in Mixtral",
                f"model.{name}={plain} for the run that is to be exported",
            )
    if any(bool(block.get_buffer("mlp.router.bias").any()) for block in model.blocks):
        raise ConfigError(
            "mode=export",
            "the experts have biases (model.balance_rate), for which the format of Mixtral has no place",
            "model.balance_rate=0 model.router_aux_loss_coef=0.01 for the run that is to be exported",
        )
