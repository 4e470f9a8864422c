"""`trl.GRPOTrainer` with `GPT2LMHeadModel`, and generation by transformers."""

import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns


class _Timer(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._turns.tick()


def match(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for each completion that is its answer, and 0 for others."""
    return [float(given == expected) for given, expected in zip(completions, answer, strict=True)]


def load_reward(file: str | None) -> Callable[..., list[float]]:
    """Return the reward that the recipe has: of a file, or that of the answer."""
    if file is None:
        return match
    found = runpy.run_path(file)["early_letters"]

    def early_letters(completions: list[str], **kwargs: Any) -> list[float]:
        scores: list[float] = found([], completions, [], [])
        return scores

    return early_letters


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    turns = Turns(spec["turn"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            seed=spec["seed"],
            max_steps=spec["steps"],
            per_device_train_batch_size=spec["completions"],
            gradient_accumulation_steps=1,
            num_generations=spec["num_generations"],
            max_completion_length=spec["max_new_tokens"],
            temperature=1.0,
            loss_type="dapo",
            scale_rewards="group",
            beta=0.0,
            epsilon=0.2,
            learning_rate=spec["lr"],
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=spec["warmup_steps"],
            bf16=spec["accelerator"] == "gpu",
            gradient_checkpointing=False,  # on by default, and slower
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=spec["accelerator"] == "cpu",
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            args=arguments,
            reward_funcs=load_reward(spec["reward"]),
            train_dataset=load_dataset("json", data_files=spec["prompts"], split="train", cache_dir=folder),
            processing_class=tokenizer,
            callbacks=[_Timer(turns)],
        )
        trainer.train()
    turns.report([row["reward"] for row in trainer.state.log_history if "reward" in row])


if __name__ == "__main__":
    main()
