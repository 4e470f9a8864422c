"""Small models with blocks, a training step for each, and every activation checkpointing option."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.model.gpt2 import GPT2, Block
from recipes.model.init import init_decoder, named_parameters, normal_
from recipes.model.llama import Llama
from recipes.model.moe import MoeLlama
from recipes.model.resnet import ResidualBlock

_DECODER: dict[str, Any] = {"vocab_size": 64, "max_seq_len": 16, "num_layers": 4, "num_heads": 2, "hidden_size": 32}


class Residual(nn.Module):
    """The blocks of ResNet-18, with 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(in_channels=8, channels=8, stride=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 8, H, W] -> [B, 8, H, W]"""
        for block in self.blocks:
            x = block(x)
        return x


class SmallClassifier(nn.Module):
    """A convolution and a head, in the place of ResNet-18 with its arguments: a step takes a millisecond."""

    input_kind: ClassVar[str] = "images"
    pretrained = None

    def __init__(self, *, num_classes: int, in_channels: int, small_images: bool) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.blocks = nn.ModuleList([nn.Conv2d(in_channels, 8, 3, stride=2 - small_images, padding=1)])
        self.head = nn.Linear(8 * 16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, V]"""
        features = torch.relu(self.blocks[0](images))  # [B, 8, H, W]
        logits: Tensor = self.head(nn.functional.adaptive_avg_pool2d(features, 4).flatten(1))
        return logits

    def init_weights(self, seed: int) -> None:
        for name, parameter in named_parameters(self):
            normal_(parameter, name=name, seed=seed, std=0.1)

    def init_buffers(self) -> None: ...


class WrappedGPT(nn.Module):
    """A language model of one's own class, of which nobody knows a published form."""

    input_kind: ClassVar[str] = "tokens"

    def __init__(
        self, *, vocab_size: int, max_seq_len: int, num_layers: int, num_heads: int, hidden_size: int, dropout: float
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.gpt = GPT2(
            vocab_size=vocab_size, max_seq_len=max_seq_len, num_layers=num_layers, num_heads=num_heads,
            hidden_size=hidden_size, dropout=dropout,
        )  # fmt: skip
        self.blocks = self.gpt.blocks

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """[B, T] -> [B, T, V]"""
        logits: Tensor = self.gpt(tokens, cache)
        return logits

    def init_weights(self, seed: int) -> None:
        self.gpt.init_weights(seed)

    def init_buffers(self) -> None:
        self.gpt.init_buffers()

    def flops_per_token(self, seq_len: float) -> Any:
        return self.gpt.flops_per_token(seq_len)


class _Tower(nn.Module):
    """Blocks of one width."""

    def __init__(self, *, num_blocks: int, hidden_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden_size=hidden_size, num_heads=2, dropout=0.0) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]"""
        for block in self.blocks:
            x = block(x, None, None)
        return x


class TwoTowers(nn.Module):
    """Reads tokens in a narrow tower of blocks, projects them, and predicts the next in a wide one."""

    input_kind: ClassVar[str] = "tokens"
    pretrained = None

    def __init__(
        self, *, vocab_size: int = 64, hidden_size: int = 32, num_layers: int = 2, max_seq_len: int = 16, **_: Any
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.embedding = nn.Embedding(vocab_size, hidden_size // 2)
        self.narrow = _Tower(num_blocks=num_layers, hidden_size=hidden_size // 2)
        self.project = nn.Linear(hidden_size // 2, hidden_size)
        self.wide = _Tower(num_blocks=num_layers + 1, hidden_size=hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)

    def named_blocks(self) -> dict[str, nn.ModuleList]:
        """Return both towers."""
        return {"narrow.blocks": self.narrow.blocks, "wide.blocks": self.wide.blocks}

    def init_weights(self, seed: int) -> None:
        """Initialize as a decoder."""
        init_decoder(self, seed=seed, num_layers=len(self.wide.blocks), vocab_size=self.vocab_size)

    def init_buffers(self) -> None:
        """Do nothing: there are no buffers."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]"""
        hidden = self.wide(self.project(self.narrow(self.embedding(tokens))))  # [B, T, W]
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class RaggedExperts(nn.Module):
    """Experts on rows with padding, which enters no term of their router."""

    def __init__(self) -> None:
        super().__init__()
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1, "router_z_loss": 0.01}
        self.inner = MoeLlama(**_DECODER, num_kv_heads=1, moe_intermediate_size=32, rope_theta=10_000.0, **experts)
        self.inner.init_weights(0)
        self.inner.init_buffers()
        self.blocks = self.inner.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, V], with the router's losses added to each logit."""
        num_inputs = torch.tensor([16, 5, 9, 1])  # [B]
        logits: Tensor = self.inner(tokens, num_inputs=num_inputs)
        return logits + self.inner.weigh_terms((self.inner.take_routed().terms * num_inputs).sum(dim=-1))


TOKENS = torch.arange(64).reshape(4, 16)  # [B, T]
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "gpt2": (lambda: GPT2(**_DECODER, dropout=0.1), lambda: TOKENS),
    "llama": (
        lambda: Llama(**_DECODER, num_kv_heads=1, ffn_hidden_size=64, rope_theta=10_000.0),
        lambda: TOKENS,
    ),
    "ragged experts": (RaggedExperts, lambda: TOKENS),
    # the input needs a gradient, like the output of a stem
    "residual": (Residual, lambda: torch.linspace(-1, 1, 4 * 8 * 64).reshape(4, 8, 8, 8).requires_grad_()),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "every block": {"every_nth_block": 1},
    "every second block": {"every_nth_block": 2},
    "selective": {"every_nth_block": 1, "save_ops": "products"},
    "selective, every second product": {"every_nth_block": 1, "save_ops": "products", "keep_every_nth_product": 2},
    "offload": {"every_nth_block": 0, "offload": True, "offload_min_mib": 0.0},
    "every block, offload": {"every_nth_block": 1, "offload": True, "offload_min_mib": 0.0},
    "selective, offload": {"every_nth_block": 1, "save_ops": "products", "offload": True, "offload_min_mib": 0.0},
    "every second selective, offload": {
        "every_nth_block": 2,
        "save_ops": "products",
        "offload": True,
        "offload_min_mib": 0.001,
    },
}
NONE = {"every_nth_block": 0}


@dataclass(frozen=True)
class Result:
    """Results of two micro-batches: the second one's loss, accumulated gradients, and running statistics."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def make(name: str, option: dict[str, Any]) -> Any:
    """Return a model with one activation checkpointing option."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    ActivationCheckpoint(**option).apply(model.blocks)
    return model


def train(name: str, option: dict[str, Any], *, backend: str | None = None) -> Result:
    """Accumulate the gradients of two micro-batches; compile the blocks if a backend is given."""
    model = make(name, option)
    if backend is not None:
        for block in model.blocks:
            block.compile(dynamic=False, backend=backend)
    torch.manual_seed(1)
    for _ in range(2):
        loss = model(MODELS[name][1]()).float().logsumexp(-1).sum()
        loss.backward()
    return Result(
        loss=loss.detach(),
        gradients={key: p.grad for key, p in model.named_parameters() if p.grad is not None},
        buffers=dict(model.named_buffers()),
    )
