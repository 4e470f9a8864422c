"""Llama with mixture-of-experts MLPs, as in Mixtral (arXiv 2401.04088): each token uses K of E experts.

FLOPs and time are those of K experts, memory that of all E.
"""

from typing import Annotated, Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from recipes.model.documents import Documents
from recipes.model.flops import Flops, flops_per_weight
from recipes.model.kv_cache import KeyValueCache, LayerCache
from recipes.model.llama import Llama
from recipes.model.llama_block import Block, Mlp
from recipes.model.moe.router import Router, Scores, find_bias_steps
from recipes.model.rope import Rotation
from recipes.numerics.expert_shape import find_wrong_experts
from recipes.numerics.grouped_linear import GroupedLinear
from recipes.numerics.permutation import Order, permute_rows, sort_rows
from recipes.parallel.experts import ExpertRanks

# Mixture-of-experts layer that replaces the MLP of a block.


class Experts(nn.Module):
    """E SwiGLU MLPs with stacked weights: `gate` and `up` [E, F, W], `out` [E, W, F].

    Attributes:
        expert_ranks: Expert-parallel ranks; None: this rank has all experts.
    """

    expert_ranks: ExpertRanks | None = None

    def __init__(self, num_experts: int, *, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate = GroupedLinear(num_experts, hidden_size, ffn_hidden_size)
        self.up = GroupedLinear(num_experts, hidden_size, ffn_hidden_size)
        self.out = GroupedLinear(num_experts, ffn_hidden_size, hidden_size)

    @override
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows: [R, W], sorted by expert.
            counts: [E] int64, rows per expert.
        """
        if self.expert_ranks is not None:
            of_all: Tensor = self.expert_ranks.compute(rows, counts, self._compute)
            return of_all
        return self._compute(rows, counts)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts of this rank."""
        ends = counts.cumsum(dim=0).to(torch.int32)  # [E]
        out: Tensor = self.out(F.silu(self.gate(rows, ends)) * self.up(rows, ends), ends)
        return out


class MoeMlp(nn.Module):
    """Routes tokens to experts and sums the weighted outputs, plus the output of shared experts."""

    def __init__(self, *, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    @override
    def forward(self, x: Tensor, is_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return [B, T, W], and loads [E] and terms [3, B] of `Routing`; arguments as for `Router.forward`."""
        routing = self.router(x, is_token)
        order = sort_rows(routing.chosen.flatten())  # [N K], sorted by expert, then by token
        rows = permute_rows(x.flatten(0, 1), order.forward, order.backward)  # [N K, W], by expert
        rows = self.experts(rows, routing.counts)
        out = combine_rows(rows, order, routing.weights.flatten(0, 1))  # [N, W]
        out = out.view(x.shape)
        if self.shared is not None:
            out = out + self.shared(x)
        return out, routing.loads, routing.terms


def combine_rows(rows: Tensor, order: Order, weights: Tensor) -> Tensor:
    """Return the weighted sum of the expert outputs of each token, [N, W].

    Args:
        rows: [N K, W], sorted by expert.
        order: Permutation that sorted the rows.
        weights: [N, K] float32; the sum is computed in float32 and rounded once.
    """
    by_token = permute_rows(rows, order.backward, order.forward).view(*weights.shape, -1)  # [N, K, W]
    return (by_token * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


class RoutedBatch(NamedTuple):
    """Routing statistics of one forward pass.

    Attributes:
        first_layer: Index of the first of these L layers among all layers with experts of the model.
        loads: [L, E] int64, tokens per expert.
        terms: [L, 3, B] float32, load-balance loss, router z-loss and entropy of each sequence.
        num_tokens: [B] int64, tokens of each sequence.
    """

    first_layer: int
    loads: Tensor
    terms: Tensor
    num_tokens: Tensor


class MoeBlock(Block):
    """Pre-norm transformer block: attention, then the experts."""

    @override
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rotation: Rotation,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
        is_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return [B, T, W], and loads [E] and terms [3, B] of the routing.

        They are returned rather than stored on the module, because activation recomputation would store them twice.
        """
        x = x + self.attention(self.attention_norm(x), rotation, cache, documents)
        out, loads, terms = self.mlp(self.mlp_norm(x), is_token)
        return x + out, loads, terms


class MoeLlama(Llama):
    """Decoder-only transformer with experts; weights are interchangeable with `MixtralForCausalLM`.

    There are two ways to balance the load of the experts; published Mixtrals support only the second. `balance_rate`
    adjusts a bias per expert after every optimizer step, by the tokens that all ranks routed to it in that step.
    `router_aux_loss_coef` and `router_z_loss` are weights of terms of the training objective, excluded from logged
    losses. Both terms are means over the tokens of a sequence, weighted by its number of targets and divided by the
    targets of the global batch like the loss, so they do not depend on how the batch is split. They are summed over
    layers. Padding is routed like any token, but is in no load and no term.

    Args:
        num_experts: E, number of experts per layer.
        num_experts_per_tok: K, number of experts per token.
        scoring_func: `softmax` over experts (Mixtral), or `sigmoid` of each (DeepSeek-V3).
        renormalize_weights: Whether the weights of a token's experts sum to 1.
        routed_scaling_factor: Factor of these weights (2.5 in DeepSeek-V3).
        n_group: Number of groups of consecutive experts. A token may only use experts in its best groups.
        topk_group: Number of groups that a token may use; 0: all.
        num_shared_experts: Number of experts applied to every token in addition, as one MLP.
        first_k_dense_replace: Number of initial layers with a dense MLP instead of experts.
        moe_intermediate_size: F, hidden width of an expert.
        ffn_hidden_size: Hidden width of the MLP in dense layers; required if there are any.
        balance_rate: Change of an expert's bias per optimizer step; 0: no bias.
        router_aux_loss_coef: Weight of the load-balance loss; 0.01 in Switch, 1e-4 with a bias in DeepSeek-V3.
        router_z_loss: Weight of the router z-loss; 1e-3 in ST-MoE.
        **settings: As for `Llama`.

    Attributes:
        routed: Routing of the last forward pass with gradients; None: already taken.

    Raises:
        ConfigError: There are fewer experts than a token needs, or a width does not fit the grouped matmul.
    """

    routes_tokens: ClassVar[bool] = True

    def __init__(
        self,
        *,
        num_experts: Annotated[int, ">= 2"],
        num_experts_per_tok: Annotated[int, ">= 1"],
        moe_intermediate_size: Annotated[int, ">= 1, <= 16777216"],
        scoring_func: Scores = "softmax",
        renormalize_weights: bool = True,
        routed_scaling_factor: Annotated[float, "> 0"] = 1.0,
        n_group: Annotated[int, ">= 1"] = 1,
        topk_group: Annotated[int, ">= 0"] = 0,
        num_shared_experts: Annotated[int, ">= 0"] = 0,
        first_k_dense_replace: Annotated[int, ">= 0"] = 0,
        ffn_hidden_size: Annotated[int, ">= 1, <= 16777216"] | None = None,
        balance_rate: Annotated[float, ">= 0"] = 0.0,
        router_aux_loss_coef: Annotated[float, ">= 0"] = 0.0,
        router_z_loss: Annotated[float, ">= 0"] = 0.0,
        **settings: Any,
    ) -> None:
        # before `super().__init__`, which builds the blocks
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.scoring_func: Scores = scoring_func
        self.renormalize_weights = renormalize_weights
        self.routed_scaling_factor = routed_scaling_factor
        self.n_group = n_group
        self.topk_group = topk_group
        self.num_shared_experts = num_shared_experts
        self.first_k_dense_replace = first_k_dense_replace
        self.moe_intermediate_size = moe_intermediate_size
        self.balance_rate = balance_rate
        self.router_aux_loss_coef = router_aux_loss_coef
        self.router_z_loss = router_z_loss
        self.routed: RoutedBatch | None = None
        sizes = {
            "num_experts": num_experts,
            "num_experts_per_tok": num_experts_per_tok,
            "n_group": n_group,
            "topk_group": topk_group,
            "first_k_dense_replace": first_k_dense_replace,
            "moe_intermediate_size": moe_intermediate_size,
            "ffn_hidden_size": ffn_hidden_size,
        }
        for mistake in find_wrong_experts(settings | sizes):
            raise mistake
        # without dense layers, nothing has the second width
        super().__init__(ffn_hidden_size=ffn_hidden_size or moe_intermediate_size, **settings)

    @override
    def _build_block(self, index: int) -> nn.Module:
        sizes: dict[str, Any] = {"hidden_size": self.hidden_size, "rms_eps": self.rms_eps}
        if index < self.first_k_dense_replace:
            mlp = Mlp(hidden_size=self.hidden_size, ffn_hidden_size=self.ffn_hidden_size)
            return Block(attention=self._build_attention(), mlp=mlp, **sizes)
        return MoeBlock(attention=self._build_attention(), mlp=self._build_experts(), **sizes)

    def _build_experts(self) -> MoeMlp:
        router = Router(
            self.hidden_size,
            num_experts=self.num_experts,
            num_chosen=self.num_experts_per_tok,
            scores=self.scoring_func,
            renormalize=self.renormalize_weights,
            scale=self.routed_scaling_factor,
            num_groups=self.n_group,
            num_chosen_groups=self.topk_group or self.n_group,
        )
        experts = Experts(self.num_experts, hidden_size=self.hidden_size, ffn_hidden_size=self.moe_intermediate_size)
        width = self.num_shared_experts * self.moe_intermediate_size
        shared = Mlp(hidden_size=self.hidden_size, ffn_hidden_size=width) if width else None
        return MoeMlp(router=router, experts=experts, shared=shared)

    @override
    def _run_blocks(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: KeyValueCache | None,
        documents: Documents | None,
        is_token: Tensor | None,
    ) -> Tensor:
        loads, terms = [], []
        for index, block in self.blocks.named_children():
            layer_cache = None if cache is None else cache.layers[int(index)]
            if int(index) < self.first_k_dense_replace:
                x = block(x, rotation, layer_cache, documents)
                continue
            x, layer_loads, layer_terms = block(x, rotation, layer_cache, documents, is_token)
            loads.append(layer_loads)
            terms.append(layer_terms)
        if loads and self.training and torch.is_grad_enabled():
            num_tokens = x.new_full((len(x),), x.shape[1], dtype=torch.int64) if is_token is None else is_token.sum(1)
            self.routed = RoutedBatch(self._list_routers()[0][0], torch.stack(loads), torch.stack(terms), num_tokens)
        return x

    @property
    def num_routed_layers(self) -> int:
        """Number of layers with experts in the whole model."""
        return self.num_layers - self.first_k_dense_replace

    def _list_routers(self) -> list[tuple[int, Router]]:
        """Return (layer, router) for the routers on this rank: a pipeline stage has only some of them."""
        first = self.first_k_dense_replace
        blocks = ((int(index) - first, block) for index, block in self.blocks.named_children())
        return [(layer, cast(Router, block.get_submodule("mlp.router"))) for layer, block in blocks if layer >= 0]

    def take_routed(self) -> RoutedBatch | None:
        """Return and drop the routing of the last forward pass with gradients, which keeps its autograd graph alive."""
        routed, self.routed = self.routed, None
        return routed

    def weigh_terms(self, terms: Tensor) -> Tensor:
        """Return the weighted sum of terms [L, 3] to add to the training objective, 0-dim."""
        balance, square, _ = terms.sum(dim=0).unbind()
        return self.router_aux_loss_coef * balance + self.router_z_loss * square

    @torch.no_grad()
    def balance_experts(self, loads: Tensor) -> None:
        """Raise the bias of underloaded experts and lower that of overloaded ones, once per optimizer step.

        Args:
            loads: [L, E] for the whole model, tokens per expert in the step, summed over all ranks.
        """
        routers = self._list_routers()
        if not routers:
            return
        biases = [router.bias for _, router in routers]
        steps = find_bias_steps(loads[[layer for layer, _ in routers]]).to(biases[0].device)  # [layers here, E]
        torch._foreach_add_(biases, list(steps.unbind()), alpha=self.balance_rate)

    @override
    @torch.no_grad()
    def init_buffers(self) -> None:
        super().init_buffers()
        for _, router in self._list_routers():
            router.bias.zero_()

    @property
    def num_idle_parameters(self) -> int:
        """Number of expert parameters not used for a given token."""
        idle = self.num_experts - self.num_experts_per_tok
        return self.num_routed_layers * idle * 3 * self.hidden_size * self.moe_intermediate_size

    @override
    def flops_per_token(self, seq_len: float) -> Flops:
        """Return the FLOPs per trained token at `seq_len`, forward and backward, counting only its active experts."""
        every = super().flops_per_token(seq_len)
        idle_fraction = 1 - self.num_experts_per_tok / self.num_experts
        experts = (module for module in self.modules() if isinstance(module, Experts))
        per_weight = flops_per_weight(self)
        idle = idle_fraction * sum(
            per_weight[weight] * weight.numel() for part in experts for weight in part.parameters()
        )
        return Flops(palm=every.palm - idle, causal=every.causal - idle)
