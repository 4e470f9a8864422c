"""A hand-written GPT-2 training loop without a framework, as a speed reference."""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

# B sequences, T tokens, C channels, H heads, V vocabulary


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attn, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fc_proj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.attn(self.ln_1(x)).split(c, dim=2)  # [B, T, C] each
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, C / H]
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocab: int, length: int, layers: int, heads: int, channels: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(length, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, vocab, bias=False)
        self.head.weight = self.wte.weight
        self.apply(self.init)

    @staticmethod
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows(Dataset[Tensor]):
    """Sequences of sequence length + 1 tokens, [T + 1] int64, from a raw file of uint16 tokens."""

    def __init__(self, path: str, *, length: int, count: int) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.length, self.count = length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length % (len(self.tokens) - self.length - 1)
        return torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))


def random_windows(path: str, *, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, [B, T] each, from random positions in a raw file of uint16 tokens."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    while True:
        starts = torch.randint(len(tokens) - length - 1, (batch,)).tolist()
        rows = [torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)) for start in starts]
        both = torch.stack(rows)  # [B, T + 1]
        yield both[:, :-1], both[:, 1:]


def train(
    shape: tuple[int, int, int, int, int],
    *,
    batch: int,
    steps: int,
    bf16: bool,
    compile_: bool,
    device: str | None = None,
    batches: Iterator[tuple[Tensor, Tensor]] | None = None,
) -> Iterator[float]:
    """Train, and yield the seconds of each step: no logging, no callbacks.

    Args:
        shape: (padded vocabulary size, sequence length, layers, heads, channels).
        batch: Sequences per step.
        steps: Total number of steps.
        bf16: Whether matmuls are in bfloat16.
        compile_: Whether to compile the model.
        device: `cuda` or `cpu`; None uses a GPU if there is one.
        batches: Inputs and targets, [B, T] each; None uses one fixed random batch.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Gpt(*shape).to(device)
    if compile_:
        model.compile()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    if batches is None:
        x, y = torch.randint(shape[0], (2, batch, shape[1])).unbind()  # [B, T] each
        batches = itertools.repeat((x.to(device), y.to(device)))
    autocast = torch.autocast(device, dtype=torch.bfloat16) if bf16 else nullcontext()
    for step in range(steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        x, y = next(batches)  # [B, T] each
        with autocast:
            loss = model(x.to(device), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - began
