"""Text written by the model itself, in the log and in samples.jsonl: one generation per prompt."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from .logged_step import StepCounter, run_folder
from .profiler_hooks import get_profiler

log = logging.getLogger("lightning_recipes")

FRAME_WIDTH = 78


class SampleText(Callback):
    """Samples at the end of training and, if `every_n_steps` is set, every that many steps.

    Calls `pl_module.generate_text(prompt, num_tokens, temperature=, top_k=, top_p=, seed=) -> str`,
    the prompt's continuation, on every rank (a sharded model needs them all); rank 0 logs and appends
    `{"step", "prompt", "text"}` to `samples.jsonl` in the run folder. A module that has no
    `generate_text`, or whose `generate_text` returns None, has no text and is left alone. The
    module's train and eval modes and every global random state are afterwards as they were.
    """

    def __init__(
        self,
        *,
        prompts: list[str],
        num_tokens: Annotated[int, ">= 1"],
        temperature: Annotated[float, ">= 0"],
        top_k: Annotated[int, ">= 1"] | None,
        top_p: Annotated[float, ">= 0.001, <= 1"] | None,
        every_n_steps: Annotated[int, ">= 1"] | None,
        seed: int = 0,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"callbacks.sample_text.every_n_steps is {every_n_steps}; samples are taken every 1"
                " or more optimizer steps; type callbacks.sample_text.every_n_steps=null to sample"
                " only at the end"
            )
        self.prompts = list(prompts)
        self.num_tokens = num_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.every_n_steps = every_n_steps
        self.seed = seed
        self._steps = StepCounter()
        self._sampled_at: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._sampled_at = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_steps is None or not self._steps.stepped(trainer):
            return
        if trainer.global_step % self.every_n_steps == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._sampled_at != trainer.global_step:
            self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        generate_text = getattr(pl_module, "generate_text", None)
        if not callable(generate_text):
            return
        self._sampled_at = trainer.global_step
        # SpeedMonitor hears the profiler, and leaves this time out of the throughput.
        with get_profiler(trainer).profile("sample_text"), _undisturbed(pl_module):
            for prompt in self.prompts:
                text = generate_text(
                    prompt,
                    self.num_tokens,
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p,
                    seed=self.seed,
                )
                if text is not None and trainer.is_global_zero:
                    _emit(trainer, prompt=prompt, text=text)


@contextmanager
def _undisturbed(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode without gradients; modes (each submodule's own) and random states come back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with isolate_rng(), torch.no_grad():
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def _emit(trainer: Trainer, *, prompt: str, text: str) -> None:
    step = trainer.global_step
    log.info("%s", framed(prompt + text, title=f"sample at step {step}, prompt {prompt!r}"))
    folder = run_folder(trainer)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")


def framed(text: str, *, title: str) -> str:
    """`text` between two rules, the upper one with a title; open at the sides, to be copied."""
    top = f"── {title} "
    return f"{top:─<{FRAME_WIDTH}}\n{text.rstrip()}\n{'─' * FRAME_WIDTH}"
