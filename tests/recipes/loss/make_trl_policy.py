"""Write trl_policy.json: losses, gradients, advantages and logged values of TRL's trainers for policies, on one batch.

Needs `pip install trl` beside the project (1.16.0). The trainers score completions and compute their loss themselves;
completions, rewards and log-probabilities are given, so that nothing has to be drawn again to compare with them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from make_trl_preferences import CONFIG, DIGITS, make_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

LENGTHS = [3, 5, 1, 6, 2, 4, 6, 5]  # of completions, in tokens: two groups of four
TRUNCATED = [3, 7]  # completions without an end
REWARDS = [1.0, 0.0, 0.25, 0.7, 0.1, 1.0, 1.0, -0.3]
NO_SPREAD = [0.1, 0.1, 0.1, 0.1, 0.0, 0.3, 0.0, 0.0]  # of the first group
EOS, DIGIT = 1, 5
MAX_NEW_TOKENS = 6
LOGGED = {
    "kl": "policy/kl",
    "entropy": "policy/entropy",
    "clip_ratio/low_mean": "policy/clipped_low_fraction",
    "clip_ratio/high_mean": "policy/clipped_high_fraction",
    "clip_ratio/region_mean": "policy/clipped_fraction",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_gap",
    "frac_reward_zero_std": "no_spread_fraction",
}


def rounded(values: Any) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in torch.as_tensor(values).detach().flatten().tolist()]


def draw() -> dict[str, Tensor]:
    """Return log-probabilities [8, 6] float64, of which some ratios and some gaps are beyond all limits."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)

    log_probs = -torch.rand(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64) * 3 - 0.1
    old = log_probs + normal(0.25)
    found = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "sampler_log_probs": old + normal(0.7),
        "reference": log_probs + normal(0.5),
        "entropy": normal(0.5).abs(),
    }
    return {name: torch.tensor(rounded(each), dtype=torch.float64).view_as(each) for name, each in found.items()}


class Given:
    """Takes the place of sampling and of the forward pass in a trainer."""

    given: dict[str, Tensor]
    reference = object()

    def _completions(self) -> list[list[int]]:
        ends = [[] if index in TRUNCATED else [EOS] for index in range(len(LENGTHS))]
        return [[DIGIT] * (length - len(end)) + end for length, end in zip(LENGTHS, ends, strict=True)]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            return self.given["log_probs"], self.given["entropy"], None
        return self.given["reference" if model is self.reference else "old_log_probs"], self.given["entropy"], None


class GivenGRPO(Given, GRPOTrainer):
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        completions = self._completions()
        sampled = self.given["sampler_log_probs"]
        of_each = [row[:length].tolist() for row, length in zip(sampled, LENGTHS, strict=True)]
        return [[2]] * len(prompts), completions, None, [""] * len(prompts), of_each, {}, None, []


class GivenRLOO(Given, RLOOTrainer):
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        return [[2]] * len(prompts), self._completions(), [""] * len(prompts)


class Recorder:
    """Runs a trainer on the batch."""

    def __init__(self) -> None:
        self.values = draw()
        self._model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        self._prompts = [{"prompt": "<bos>"} for _ in LENGTHS]

    def _make(self, trainer: Any, config: Any, rewards: list[float], options: dict[str, Any]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            arguments = config(
                output_dir=folder,
                per_device_train_batch_size=len(LENGTHS),
                num_generations=4,
                max_completion_length=MAX_NEW_TOKENS,
                beta=0.0,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                **options,
            )
            run = trainer(
                model=self._model,
                args=arguments,
                train_dataset=Dataset.from_list(self._prompts),
                processing_class=make_tokenizer(),
                reward_funcs=lambda prompts, completions, **columns: rewards,
            )
        run.given = self.values | {"log_probs": self.values["log_probs"].clone().requires_grad_()}
        run.model.train()
        run.current_gradient_accumulation_steps = 1
        return run

    def grpo(
        self, *, rewards: list[float] = REWARDS, beta: float = 0.0, correct: bool = False, **options: Any
    ) -> dict[str, Any]:
        run = self._make(GivenGRPO, GRPOConfig, rewards, options)
        run.beta, run.ref_model = beta, run.reference  # set late: the reference would be loaded
        run.use_vllm, run.vllm_importance_sampling_correction = correct, correct  # set late: vLLM would be imported
        inputs = run._generate_and_score_completions(self._prompts)
        loss = run._compute_loss(run.model, inputs)
        loss.backward()
        logged = {LOGGED[name]: value[-1] for name, value in run._metrics["train"].items() if name in LOGGED}
        return {
            "loss": rounded(loss)[0],
            "gradients": rounded(run.given["log_probs"].grad),
            "advantages": rounded(inputs["advantages"]),
            "logged": {name: rounded(value)[0] for name, value in logged.items()},
        }

    def rloo(self, *, rewards: list[float] = REWARDS, **options: Any) -> dict[str, Any]:
        run = self._make(GivenRLOO, RLOOConfig, rewards, options)
        return {"advantages": rounded(run._generate_and_score_completions(self._prompts)["advantages"])}


def main() -> None:
    record = Recorder()
    later = {"num_iterations": 2, "epsilon_high": 0.28, "beta": 0.04}
    gspo = {
        **later,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.02,
        "epsilon_high": 0.03,
    }
    cases = {
        "first_iteration": record.grpo(),
        "first_iteration_with_reference": record.grpo(beta=0.04),
        "dapo": record.grpo(loss_type="dapo", **later),
        "grpo": record.grpo(loss_type="grpo", **later),
        "dr_grpo": record.grpo(loss_type="dr_grpo", **later),
        "bnpo": record.grpo(loss_type="bnpo", **later),
        "gspo": record.grpo(**gspo),
    }
    for kind in ("dapo", "grpo", "dr_grpo"):
        cases[f"{kind}_masked"] = record.grpo(loss_type=kind, mask_truncated_completions=True, **later)
    cases["gspo_masked"] = record.grpo(**gspo, mask_truncated_completions=True)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        weights = {"correct": True, "vllm_importance_sampling_mode": mode}
        cases[f"dapo_{mode}"] = record.grpo(loss_type="dapo", **weights, **later)
        if mode.startswith("sequence"):
            cases[f"gspo_{mode}"] = record.grpo(**gspo, **weights)
    for scale in ("group", "batch", "none"):
        cases[f"scale_{scale}"] = record.grpo(scale_rewards=scale)
        cases[f"no_spread_scale_{scale}"] = record.grpo(rewards=NO_SPREAD, scale_rewards=scale)
    cases["rloo"] = record.rloo()
    cases["rloo_normalized"] = record.rloo(normalize_advantages=True)
    cases["rloo_no_spread"] = record.rloo(rewards=NO_SPREAD)
    recorded = {
        "lengths": LENGTHS,
        "truncated": TRUNCATED,
        "rewards": REWARDS,
        "no_spread": NO_SPREAD,
        "max_new_tokens": MAX_NEW_TOKENS,
        "values": {name: rounded(each) for name, each in record.values.items()},
        "cases": cases,
    }
    path = Path(__file__).parent / "trl_policy.json"
    path.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
