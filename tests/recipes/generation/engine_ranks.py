"""Train on several ranks and generate between two steps: tokens, their log-probabilities, and collectives.

python engine_ranks.py <cases.json> <results.json>.
"""

import sys
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(_TESTS / "parity"), str(_TESTS), str(_TESTS.parent)]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, resolved  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.generation import Sampling, generate  # noqa: E402
from recipes.strategy.sharding import count_gathered_bytes  # noqa: E402

PROMPTS = [[1, 2, 3], [7], [4, 5, 6, 7, 8]]
NUM_SAMPLES, NUM_TOKENS = 2, 8
AT_STEP = 2


class Generates(Callback):
    """Generates after a step, and keeps what was generated."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == AT_STEP and not self.found:
            with trainer.precision_plugin.forward_context():
                self.found = self._generate(trainer, task)

    def _generate(self, trainer: Any, task: Any) -> dict[str, Any]:
        strategy = trainer.strategy
        with profile(activities=[ProfilerActivity.CPU]) as profiler, strategy.gather_for_generation() as is_independent:
            completions = generate(
                task.model,
                PROMPTS,
                NUM_TOKENS,
                sampling=Sampling(temperature=0.9),
                seeds=range(len(PROMPTS) * NUM_SAMPLES),
                num_samples=NUM_SAMPLES,
                agree=None if is_independent else strategy.share_first,
            )
        names = [event.name for event in profiler.events()]
        return {
            "tokens": [completion.tokens for completion in completions],
            "difference": max(self._compare(task, index, row) for index, row in enumerate(completions)),
            "gathers": sum(name.startswith("c10d::") and "gather" in name.replace("_", "") for name in names),
            "is_independent": is_independent,
            "gathered_bytes": count_gathered_bytes(strategy._roots[0]) if hasattr(strategy, "_roots") else None,
        }

    @torch.no_grad()
    def _compare(self, task: Any, index: int, completion: Any) -> float:
        """Return the largest difference from the log-probabilities of a forward pass over the whole row."""
        prompt = PROMPTS[index // NUM_SAMPLES]
        tokens = torch.tensor([[*prompt, *completion.tokens]])
        task.eval()
        logits = task.model(tokens)[0, len(prompt) - 1 : -1] / 0.9  # [N, V]
        task.train()
        of_tokens = logits.float().log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        return float((of_tokens - torch.tensor(completion.log_probabilities)).abs().max())


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    run = build(resolved(composed_config(*case["overrides"]), folder))
    generates = Generates()
    if case["generates"]:
        run.trainer.callbacks.insert(0, generates)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    of_rank = generates.found | {"loss": float(run.trainer.callback_metrics["train/loss"])}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, of_rank)
    return {"ranks": of_ranks}


if __name__ == "__main__":
    run_all(run_case)
