"""Write trl_preferences.json: losses, logged values and gradients of TRL's trainers for preferences, on one batch.

Needs `pip install trl` beside the project (1.16.0). The model, the reference and the reward model are in the file, so
that nothing has to be drawn again to compare with it.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

VOCABULARY = ["<pad>", "<eos>", "<bos>", *"0123456789+-="]
PROMPTS = ["<bos>1+2=", "<bos>10+50=", "<bos>7=", "<bos>9-9-3="]
CHOSEN = ["3", "60", "7", "9-12"]
REJECTED = ["45", "1", "5077", "8"]
MARGINS = [0.5, 0.0, 2.0, 1.0]
LABELS = [True, False, True, False, False, True, False, False]  # of the chosen answers, then of the rejected ones
CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.5,
    "attn_implementation": "eager",
}
LOGGED = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "logps/chosen": "chosen_log_prob",
    "logps/rejected": "rejected_log_prob",
    "margin": "margin",
    "accuracy": "accuracy",
    "kl": "kl",
}
DIGITS = 9


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="right"
    )


def rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.detach().flatten().tolist()]


def shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in model.named_parameters()}


def gradients(model: nn.Module) -> list[float]:
    return [value for weight in model.parameters() if weight.grad is not None for value in rounded(weight.grad)]


def rows_of(batch: Mapping[str, torch.Tensor]) -> set[tuple[int, ...]]:
    """Return the tokens of all rows of a batch of any of the trainers, without padding."""
    found = set()
    for name, ids in batch.items():
        if not name.endswith("input_ids") or name in ("prompt_input_ids", "KL_input_ids"):
            continue
        found |= {tuple(token for token in row if token) for row in ids.tolist()}
    return found


class Recorder:
    """Runs a trainer of TRL on one batch, of all rows."""

    def __init__(self, tokens: Mapping[str, list[list[int]]]) -> None:
        self._tokenizer = make_tokenizer()
        ends = [[*tokens["prompts"][i], *tokens[name][i]] for name in ("chosen", "rejected") for i in range(4)]
        self._expected = {tuple(row) for row in ends}

    def __call__(
        self,
        trainer: Callable[..., Any],
        config: Callable[..., Any],
        rows: Mapping[str, Any],
        model: nn.Module,
        **options: Any,
    ) -> dict[str, Any]:
        others = {name: options.pop(name) for name in ("ref_model",) if name in options}
        data = Dataset.from_dict(dict(rows))
        with tempfile.TemporaryDirectory() as folder:
            arguments = config(
                output_dir=folder,
                per_device_train_batch_size=len(data),
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                max_length=32,
                remove_unused_columns=trainer not in (CPOTrainer, ORPOTrainer) and config is not KTOConfig,
                **options,
            )
            run = trainer(model=model, args=arguments, train_dataset=data, processing_class=self._tokenizer, **others)
            batch = next(iter(run.get_train_dataloader()))
            assert rows_of(batch) == self._expected, (rows_of(batch), self._expected)
            model.zero_grad()
            model.train()
            loss = run.compute_loss(run.model, dict(batch))
            loss.backward()
        logged = getattr(run, "_metrics", None) or run._stored_metrics
        values = {LOGGED[name]: value[-1] for name, value in logged["train"].items() if name in LOGGED}
        return {
            "loss": float(f"{loss.item():.{DIGITS}g}"),
            "logged": {name: float(f"{float(value):.{DIGITS}g}") for name, value in values.items()},
            "gradients": gradients(model),
        }


def main() -> None:
    torch.manual_seed(1)  # good answers above and below the reference, and a divergence above 0
    model, reference = (LlamaForCausalLM(LlamaConfig(**CONFIG)).double() for _ in range(2))
    reward = LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1)).double()
    with torch.no_grad():
        for weight in (*model.parameters(), *reference.parameters(), *reward.parameters()):
            weight.copy_(torch.tensor(rounded(weight), dtype=weight.dtype).view_as(weight))  # as they are in the file
    tokenizer = make_tokenizer()

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    tokens = {
        "prompts": encode(PROMPTS),
        "chosen": [[*answer, 1] for answer in encode(CHOSEN)],
        "rejected": [[*answer, 1] for answer in encode(REJECTED)],
    }
    record = Recorder(tokens)
    pairs = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
    answers = {"prompt": PROMPTS * 2, "completion": [*CHOSEN, *REJECTED], "label": LABELS}

    def dpo(kinds: list[str], **options: Any) -> dict[str, Any]:
        return record(DPOTrainer, DPOConfig, pairs, model, ref_model=reference, loss_type=kinds, **options)

    def kto(**options: Any) -> dict[str, Any]:
        return record(KTOTrainer, KTOConfig, answers, model, ref_model=reference, beta=0.1, **options)

    def simpo(**options: Any) -> dict[str, Any]:
        return record(CPOTrainer, CPOConfig, pairs, model, loss_type="simpo", beta=2.0, **options)

    def bradley_terry(rows: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        return record(RewardTrainer, RewardConfig, rows, reward, **options)

    cases = {
        "dpo_sigmoid": dpo(["sigmoid"], beta=0.1),
        "dpo_sigmoid_smoothed": dpo(["sigmoid"], beta=0.1, label_smoothing=0.3),
        "dpo_hinge": dpo(["hinge"], beta=0.5),
        "dpo_ipo": dpo(["ipo"], beta=0.1),
        "dpo_robust": dpo(["robust"], beta=0.1, label_smoothing=0.1),
        "dpo_nll": dpo(["sigmoid", "sft"], beta=0.1, loss_weights=[1.0, 0.5]),
        "orpo": record(ORPOTrainer, ORPOConfig, pairs, model, beta=0.1),
        "simpo": simpo(simpo_gamma=1.0, cpo_alpha=0.0),
        "simpo_nll": simpo(simpo_gamma=0.5, cpo_alpha=0.3),
        "kto": kto(),
        "kto_weights": kto(desirable_weight=1.5, undesirable_weight=0.5),
        "kto_below": record(KTOTrainer, KTOConfig, answers, reference, ref_model=model, beta=0.1),
        "reward": bradley_terry(pairs),
        "reward_margin": bradley_terry(pairs | {"margin": MARGINS}),
        "reward_centred": bradley_terry(pairs | {"margin": MARGINS}, center_rewards_coefficient=0.01),
    }
    models_ = {"model": model, "reference": reference, "reward": reward}
    recorded = {
        "config": CONFIG,
        "shapes": {name: shapes(each) for name, each in models_.items()},
        "weights": {name: [v for p in each.parameters() for v in rounded(p)] for name, each in models_.items()},
        "tokens": tokens | {"margins": MARGINS, "labels": [int(label) for label in LABELS]},
        "cases": cases,
    }
    path = Path(__file__).parent / "trl_preferences.json"
    path.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
