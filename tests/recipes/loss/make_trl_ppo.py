"""Write trl_ppo.json: advantages, returns, loss and gradients of TRL's PPOTrainer, on one rollout.

Needs `pip install trl==0.24.0` beside the project, the last version whose wheel has the trainer. Its method `train` is
one loop that samples, estimates and steps; the lines that estimate and those that compute the loss are executed from
its source with the values below in the place of what it samples. All completions have the same length, because TRL
gives the score of a shorter one to the token after its end.
"""

import inspect
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.core import masked_mean, masked_whiten
from trl.trainer.ppo_trainer import PPOTrainer

SIZE, LENGTH = 5, 6
DIGITS = 12
SCORES = [1.0, -0.5, 0.25, 2.0, 0.0]
ESTIMATES = ("# 4. compute rewards", "empty_cache()")
LOSS = ("vpredclipped = torch.clamp(", "accelerator.backward(loss)")
FRACTION = ("pg_clipfrac = masked_mean(", "prob_dist =")


def rounded(values: Any) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in torch.as_tensor(values).detach().flatten().tolist()]


def cut(begin: str, end: str) -> str:
    """Return the lines of the trainer from the one with `begin` up to the one with `end`."""
    lines = inspect.getsource(PPOTrainer.train).splitlines()
    first = next(number for number, line in enumerate(lines) if begin in line)
    last = next(number for number, line in enumerate(lines) if number > first and end in line)
    return textwrap.dedent("\n".join(lines[first:last]))


def draw() -> dict[str, Tensor]:
    """Return values of tokens [5, 6] float64, of which some ratios and values are beyond their limits."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(SIZE, LENGTH, generator=generator, dtype=torch.float64)

    old = -torch.rand(SIZE, LENGTH, generator=generator, dtype=torch.float64) * 3 - 0.1
    old_values = normal(0.5)
    found = {
        "old_log_probs": old,
        "reference": old + normal(0.4),
        "old_values": old_values,
        "log_probs": old + normal(0.3),
        "values": old_values + normal(0.3),
    }
    return {name: torch.tensor(rounded(each), dtype=torch.float64).view_as(each) for name, each in found.items()}


def record(given: dict[str, Tensor], *, estimator: str, whiten_rewards: bool, gamma: float, lam: float) -> Any:
    nothing = torch.zeros(SIZE, LENGTH, dtype=torch.bool)
    names: dict[str, Any] = {
        "torch": torch,
        "masked_mean": masked_mean,
        "masked_whiten": masked_whiten,
        "args": SimpleNamespace(
            kl_estimator=estimator,
            kl_coef=0.05,
            whiten_rewards=whiten_rewards,
            gamma=gamma,
            lam=lam,
            cliprange=0.2,
            cliprange_value=0.2,
            vf_coef=0.1,
        ),
        "logprobs": given["old_log_probs"],
        "ref_logprobs": given["reference"],
        "values": given["old_values"],
        "responses": nothing,
        "scores": torch.tensor(SCORES, dtype=torch.float64),
        "sequence_lengths": torch.full((SIZE,), LENGTH - 1),
        "sequence_lengths_p1": torch.full((SIZE,), LENGTH),
        "padding_mask": nothing,
        "padding_mask_p1": nothing,
        "micro_batch_inds": np.arange(SIZE),
    }
    exec(cut(*ESTIMATES), names)
    log_probs, values = (given[name].clone().requires_grad_() for name in ("log_probs", "values"))
    names |= {
        "mb_advantage": names["advantages"],
        "mb_logprobs": given["old_log_probs"],
        "mb_return": names["returns"],
        "mb_values": given["old_values"],
        "new_logprobs": log_probs,
        "vpred": values,
    }
    exec(cut(*LOSS), names)
    exec(cut(*FRACTION), names)
    names["loss"].backward()
    return {
        "advantages": rounded(names["advantages"]),
        "returns": rounded(names["returns"]),
        "loss": rounded(names["loss"])[0],
        "policy_gradients": rounded(log_probs.grad),
        "value_gradients": rounded(values.grad),
        "value/loss": rounded(names["vf_loss"])[0],
        "value/clipped_fraction": rounded(names["vf_clipfrac"])[0],
        "policy/clipped_fraction": rounded(names["pg_clipfrac"])[0],
    }


def main() -> None:
    given = draw()
    usual = {"estimator": "k1", "whiten_rewards": False, "gamma": 1.0, "lam": 0.95}
    cases = {
        "usual": record(given, **usual),
        "k3": record(given, **usual | {"estimator": "k3"}),
        "whitened_rewards": record(given, **usual | {"whiten_rewards": True}),
        "discounted": record(given, **usual | {"gamma": 0.9, "lam": 0.5}),
    }
    recorded = {"scores": SCORES, "values": {name: rounded(each) for name, each in given.items()}, "cases": cases}
    path = Path(__file__).parent / "trl_ppo.json"
    path.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
