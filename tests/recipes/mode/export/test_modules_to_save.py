"""A run that trains a projector beside an adapter: its exports, runs that start from it, and what stays as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from support import execute, read_metrics
from vision_language_cases import IMAGE_SIZE, IMAGE_TOKEN, PATCHES, write_llava

from recipes.build import build
from recipes.config import compose_and_check
from recipes.config.resolved import ResolvedRun
from recipes.mode.load import load_task

PROJECTOR = "multi_modal_projector"
DATA = [
    *("data=random_tokens", "data._target_=vision_language_cases.Illustrated", "data.num_samples=50"),
    *("~data.vocab_size", "tokenizer=none", "seq_len=32"),
]
TRUSTED = "++data._target_=vision_language_cases.Illustrated"
RUN = [
    *("trainer.max_steps=3", "save_every=3", "eval_every=3", "eval_samples=16", "global_batch_size=4"),
    *("trainer.accelerator=cpu", "strategy=single", "precision=32-true", "optimizer.lr=1e-2", "warmup_steps=1"),
    *("scheduler=constant", "callbacks=[]", "seed=7"),
]
ADAPTER = ["adapter=lora", "adapter.r=4", f"adapter.modules_to_save=[{PROJECTOR}]"]
STILL = ["optimizer.lr=1e-30", "trainer.max_steps=1", "eval_every=1", "save_every=1"]  # the weights stay as they are
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    torch.manual_seed(0)
    model: Any = hf.LlavaForConditionalGeneration(hf.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that executes a run in a new folder, and returns the folder."""

    def run(name: str, *typed: str) -> Path:
        where = tmp_path_factory.mktemp(name)
        model = ["model=llava", f"model.name={published}", "model.max_seq_len=32"]
        assert execute(*model, *DATA, *RUN, *typed, f"hydra.run.dir={where}") == 0
        return where

    return run


@pytest.fixture(scope="module")
def trained(start: Run) -> Path:
    return start("trained", *ADAPTER)


def load(run: Path) -> Any:
    resolved, mistakes = compose_and_check(["mode=evaluate", f"resume={run}", TRUSTED])
    assert isinstance(resolved, ResolvedRun), mistakes
    task, _ = load_task(build(resolved), "trained")
    return task.model.eval()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, :PATCHES] = IMAGE_TOKEN
    return tokens, torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(1))


def test_what_is_neither_adapted_nor_named_keeps_every_bit(trained: Path, published: Path) -> None:
    before = hf.LlavaForConditionalGeneration.from_pretrained(published).state_dict()
    model = load(trained)
    num_kept = num_changed = 0
    for name, parameter in model.inner.named_parameters():
        plain = name.replace(".base_layer", "")
        if PROJECTOR in plain:
            num_changed += 1
            assert not torch.equal(parameter, before[plain]), name
        elif ".lora_" not in plain:
            num_kept += 1
            assert torch.equal(parameter, before[plain]), name
    assert num_changed == 4
    assert num_kept > 40


def test_both_exports_compute_what_the_run_has_learned(trained: Path, published: Path, tmp_path: Path) -> None:
    tokens, images = example()
    model = load(trained)
    expected = model(tokens, images=images)
    separate, merged = (tmp_path / name for name in ("separate", "merged"))
    for adapter, folder in (("separate", separate), ("merged", merged)):
        assert (
            execute("mode=export", f"resume={trained}", TRUSTED, f"mode.adapter={adapter}", f"mode.path={folder}") == 0
        )
    whole = hf.LlavaForConditionalGeneration.from_pretrained(merged).eval()
    torch.testing.assert_close(whole(input_ids=tokens, pixel_values=images).logits, expected, rtol=1e-5, atol=1e-5)
    base = hf.LlavaForConditionalGeneration.from_pretrained(published)
    theirs = peft.PeftModel.from_pretrained(base, str(separate)).eval()
    torch.testing.assert_close(theirs(input_ids=tokens, pixel_values=images).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_run_that_starts_from_it_keeps_the_projector_or_merges_all(start: Run, trained: Path) -> None:
    loss = read_metrics(trained)[-1]["val/loss"]
    kept = start("kept", f"start_from={trained}", *ADAPTER, *STILL)
    assert read_metrics(kept)[-1]["val/loss"] == loss
    merged = start("merged", f"start_from={trained}", *STILL)
    assert read_metrics(merged)[-1]["val/loss"] == pytest.approx(loss, rel=1e-6)  # W + BA in another order
    again = start("again", f"start_from={kept}", *ADAPTER, *STILL)
    assert read_metrics(again)[-1]["val/loss"] == loss, "the frozen weights of the first run, and the projector of it"
