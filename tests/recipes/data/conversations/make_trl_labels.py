"""Write trl_labels.json: tokens and masks of TRL's SFTTrainer. Needs `pip install trl` beside the project (1.16.0)."""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from chats import CHATS, TEMPLATES, WITH_BLOCKS, make_backend, messages_of
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def labels(template: str, rows: list[dict], **options: bool) -> list[dict[str, list[int]]]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, report_to=[], use_cpu=True, bf16=False, eos_token=None, max_length=None, **options
        )
        trainer = SFTTrainer(
            LlamaForCausalLM(config).to(torch.float32),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        return [{"tokens": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]


def main() -> None:
    chats = [messages_of(chat) for chat in CHATS]
    pairs = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
    found = {name: labels(template, pairs) for name, template in TEMPLATES.items()}
    found["blocks"] = labels(WITH_BLOCKS, [{"messages": chat} for chat in chats], assistant_only_loss=True)
    (Path(__file__).parent / "trl_labels.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
