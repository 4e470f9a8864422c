"""`transformers.Trainer` with `GPT2LMHeadModel` or `LlamaForCausalLM`, and the fused optimizer it takes by default."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from spec import LOG_EVERY, Clock, Spec, read_spec
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parent.parent))

from plain_gpt2 import Windows


class _Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index][:-1]  # the model shifts its labels
        return {"input_ids": tokens, "labels": tokens}


class _Timer(TrainerCallback):
    def __init__(self) -> None:
        self.clock = Clock()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()


def build_model(spec: Spec) -> torch.nn.Module:
    if spec.family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=spec.vocab_size,
                max_position_embeddings=spec.seq_len,
                num_hidden_layers=spec.num_layers,
                num_attention_heads=spec.num_heads,
                num_key_value_heads=spec.num_heads,
                hidden_size=spec.hidden_size,
                intermediate_size=spec.ffn_hidden_size,
                tie_word_embeddings=True,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=spec.vocab_size,
            n_positions=spec.seq_len,
            n_layer=spec.num_layers,
            n_head=spec.num_heads,
            n_embd=spec.hidden_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def main() -> None:
    spec, timer = read_spec(), _Timer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=spec.batch,
            max_steps=spec.num_steps,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=spec.bf16,
            torch_compile=spec.compile,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        windows = Windows(spec.tokens, length=spec.seq_len, count=spec.num_steps * spec.batch)
        Trainer(build_model(spec), arguments, train_dataset=_Samples(windows), callbacks=[timer]).train()
    timer.clock.report(spec)


if __name__ == "__main__":
    main()
