"""Models of transformers under every strategy: the curve of a plain loop around the model itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from cases import COMMON, GLOBAL_BATCH_SIZE, IS_LONG, NUM_STEPS, STRATEGIES, TOKENS, largest_difference, shortened
from support import MaskedTokens

from recipes.data.order import ShuffledOrder
from recipes.scheduler import warmup_cosine

LR = 1e-3
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
# norms of queries and keys, tied heads, sliding windows, scaled embeddings, capped logits
OTHERS: dict[str, Any] = {
    "qwen2": lambda: hf.Qwen2Config(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=8),
    "gemma": lambda: hf.GemmaConfig(**SMALL),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, sliding_window=8),
    "gemma3": lambda: hf.Gemma3TextConfig(**SMALL, sliding_window=8),
}
ON_ONE = {f"{kind}, {more}": (kind, "single", more) for kind in KINDS for more in ("eager", "recomputed", "all logits")}
ON_TWO = {f"{kind}, {name}": (kind, name, "eager") for kind in KINDS for name in ("ddp", "fsdp", "ZeRO-2", "ZeRO-3")}
ON_ONE |= {f"{kind}, eager": (kind, "single", "eager") for kind in OTHERS if IS_LONG}
# of the others one strategy here, and the rest in `make test-long`
_LONG_TOO = ("fsdp", "ZeRO-3") if IS_LONG else ("fsdp",)
ON_TWO |= {f"{kind}, {name}": (kind, name, "eager") for kind in OTHERS for name in _LONG_TOO}
ON_TWO = shortened(
    ON_TWO, "llama, ZeRO-3", "gpt2, ddp", "gpt2, fsdp", *(f"{kind}, fsdp" for kind in ("qwen3", "gemma2", "gemma3"))
)
MORE = {"eager": [], "recomputed": ["activation_checkpoint=selective"], "all logits": ["loss_chunk_tokens=null"]}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, config in (KINDS | OTHERS).items():
        torch.manual_seed(0)
        made[kind] = tmp_path_factory.mktemp(kind)
        hf.AutoModelForCausalLM.from_config(config()).save_pretrained(made[kind])
    return made


def make_case(entry: tuple[str, str, str], folders: dict[str, Path], *, world_size: int) -> dict[str, Any]:
    kind, strategy, more = entry
    overrides = [
        *("model=huggingface", f"model.name={folders[kind]}", "model.max_seq_len=16", "data=random_tokens"),
        *(*COMMON, *STRATEGIES[strategy], *MORE[more], f"optimizer.lr={LR}"),
        f"micro_batch_size={GLOBAL_BATCH_SIZE // world_size // 2}",
        f"trainer.devices={world_size}",
    ]
    return {"overrides": overrides, "data": TOKENS}


@pytest.fixture
def curve(rows: Any, folders: dict[str, Path]) -> Any:
    def find(name: str) -> list[dict[str, float]]:
        entries, size = (ON_ONE, 1) if name in ON_ONE else (ON_TWO, 2)
        cases = {key: make_case(entry, folders, world_size=size) for key, entry in entries.items()}
        found: list[dict[str, float]] = rows(f"transformers on {size}", cases, name, world_size=size)
        return found

    return find


@pytest.fixture(scope="session")
def plain(folders: dict[str, Path]) -> Any:
    """Return the losses and norms of a loop that knows nothing of this project but its order and its schedule."""

    def train(kind: str) -> list[dict[str, float]]:
        model = hf.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).train()
        data = MaskedTokens(num_samples=50, seq_len=16, vocab_size=64)
        order = ShuffledOrder(50, 7)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
        found = []
        for step in range(NUM_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = LR * warmup_cosine(step, num_steps=NUM_STEPS, warmup_steps=5, min_lr_factor=0.1)
            indices = order.indices(step * GLOBAL_BATCH_SIZE + np.arange(GLOBAL_BATCH_SIZE)).tolist()
            samples = [data[index] for index in indices]
            inputs, targets = (torch.stack([sample[name] for sample in samples]) for name in ("inputs", "targets"))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            found.append({"train/loss": loss.item(), "grad/norm": norm.item()})
        return found

    return train


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO])
def test_the_curve_is_that_of_a_plain_loop(name: str, curve: Any, plain: Any) -> None:
    difference = largest_difference(curve(name), plain(name.partition(",")[0]))
    # float32: other orders of the same sums
    assert difference["train/loss"] < 1e-5
    assert difference["grad/norm"] < 1e-4
