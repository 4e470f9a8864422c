"""Generate text during training and write it to the log and to samples.jsonl."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from .files import LineFile
from .lightning_packages import Callback
from .logged_step import StepCounter, completed_steps, run_folder
from .profiler_hooks import get_profiler
from .protocols import SupportsText

log = logging.getLogger("lightning_recipes")

FRAME_WIDTH = 78


class SampleText(Callback):
    """Generates text at the end of training and, if set, every `every_n_steps` optimizer steps.

    Useful for judging a language model beyond its loss, and for noticing broken tokenization.

    Calls `generate_fn`, else the module's `recipes_generate_text` if it is a `SupportsText`, on every rank (a sharded
    model needs all of them); one line says so if there is neither. If None is returned, nothing is logged. Rank 0 logs
    the continuation and appends `{"step", "prompt", "text"}` to `samples.jsonl` in the run folder. The module's train
    and eval modes and all global RNG states are restored afterwards.

    Args:
        prompts: Texts to continue.
        num_tokens: Tokens to generate per prompt.
        temperature: Divides the logits; 0 always picks the most likely token.
        top_k: Sample from the k most likely tokens; None samples from all.
        top_p: Sample from the smallest set of most likely tokens with this total probability; None samples from all.
        every_n_steps: Optimizer steps between samples. None samples only at the end.
        seed: Sampling seed, the same for every generation.
        generate_fn: Called as `generate_fn(module, prompt, num_tokens, temperature=…, top_k=…, top_p=…, seed=…)` in
            eval mode, without gradients, with torch's global generator seeded; returns the text after the prompt. With
            a model and tokenizer of transformers, it decodes what `module.model.generate` adds to the prompt's tokens.

    Raises:
        ValueError: An argument is outside its range.

    Example:
        >>> samples = SampleText(
        ...     prompts=["Once upon"], num_tokens=32, temperature=0.8, top_k=50, top_p=None, every_n_steps=500
        ... )
        >>> trainer = Trainer(callbacks=[samples], accelerator="cpu", logger=False)
        >>> samples.every_n_steps
        500
    """

    def __init__(
        self,
        *,
        prompts: list[str],
        num_tokens: Annotated[int, ">= 1"] = 128,
        temperature: Annotated[float, ">= 0, <= 1000"] = 1.0,
        top_k: Annotated[int, ">= 1"] | None = None,
        top_p: Annotated[float, ">= 0.001, <= 1"] | None = None,
        every_n_steps: Annotated[int, ">= 1"] | None = None,
        seed: Annotated[int, ">= 0"] = 0,
        generate_fn: Callable[..., str | None] | None = None,
    ) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"every_n_steps is {every_n_steps}; an interval is 1 or more optimizer steps; set None to sample only"
                " at the end"
            )
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; a sample has 1 or more tokens; set num_tokens=128")
        if not temperature >= 0:
            raise ValueError(f"temperature is {temperature}; logits are divided by it; set 0 for the most likely token")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; at least 1 token must be left to sample; set None to sample from all")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; a probability is above 0 and at most 1; set None to sample from all")
        if isinstance(prompts, str):
            raise ValueError(f"prompts is the text {prompts!r}; it is a list of texts; set prompts=[{prompts!r}]")
        self.prompts = list(prompts)
        self.num_tokens = num_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.every_n_steps = every_n_steps
        self.seed = seed
        self._generate_fn = generate_fn
        self._steps = StepCounter()
        self._sampled_at: int | None = None  # step of the latest sample
        self._file: LineFile | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._sampled_at = None
        if self._generate_fn is None and not isinstance(pl_module, SupportsText) and trainer.is_global_zero:
            name = type(pl_module).__name__
            log.warning(f"SampleText is off: {name} has no recipes_generate_text; pass generate_fn to SampleText")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_steps is None or not self._steps.stepped(trainer):
            return
        if completed_steps(trainer) % self.every_n_steps == 0:
            self._sample(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._sampled_at != completed_steps(trainer):
            self._sample(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.finish()

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        generate: Callable[..., str | None]
        if self._generate_fn is not None:
            generate = partial(self._generate_fn, pl_module)
        elif isinstance(pl_module, SupportsText):
            generate = pl_module.recipes_generate_text
        else:
            return
        self._sampled_at = completed_steps(trainer)
        # SpeedMonitor listens to the profiler and excludes this time from throughput
        with get_profiler(trainer).profile("sample_text"), inference_state(pl_module):
            for prompt in self.prompts:
                torch.manual_seed(self.seed)
                text = generate(
                    prompt,
                    self.num_tokens,
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p,
                    seed=self.seed,
                )
                if text is not None and trainer.is_global_zero:
                    self._log_sample(trainer, prompt=prompt, text=text)

    def _log_sample(self, trainer: Trainer, *, prompt: str, text: str) -> None:
        step = completed_steps(trainer)
        log.info("%s", framed(prompt + text, title=f"sample at step {step}, prompt {prompt!r}"))
        folder = run_folder(trainer)
        if folder is None:
            return
        path = folder / "samples.jsonl"
        if self._file is None or self._file.path != path:
            self._file = LineFile(path)
        self._file.append([json.dumps({"step": step, "prompt": prompt, "text": text})])


@contextmanager
def inference_state(module: torch.nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients; restore each submodule's mode and all RNG states afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with isolate_rng(), torch.no_grad():
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def framed(text: str, *, title: str) -> str:
    """Return the text between two horizontal rules, the upper one titled; no side borders, so it can be copied."""
    top = f"── {title} "
    return f"{top:─<{FRAME_WIDTH}}\n{text.rstrip()}\n{'─' * FRAME_WIDTH}"
