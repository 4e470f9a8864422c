"""Private attributes of Lightning and DeepSpeed are used in their homes only: an upgrade has few places to check."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import Profiler

from recipes.lightning_internals import skip_empty_hooks

ROOT = Path(__file__).parents[2]
LIGHTNING_HOMES = {
    "recipes/lightning_internals.py",
    "callbacks/lightning_internals.py",  # callbacks/ may not import recipes/
}
DEEPSPEED_HOME = "recipes/strategy/deepspeed/"
_LIGHTNING_OBJECTS = (
    r"trainer|strategy|fit_loop|epoch_loop|val_loop|loop|lightning_module|pl_module|precision_plugin"
    r"|_?\w*_connector"
)
_PRIVATE_OF_LIGHTNING = re.compile(rf"\b(?:{_LIGHTNING_OBJECTS})\._[a-z]\w*")
_PRIVATE_OF_DEEPSPEED = re.compile(
    r"\b(?:deepspeed_engine|zero_init)\._[a-z]\w*"
    r"|\b_(?:hp_mapping|z3_optimizer|update_scale|swappable_optimizer_subgroup|get_norm_groups)\b"
)


def find_uses(pattern: re.Pattern[str], *folders: str) -> dict[str, list[str]]:
    """Return what a pattern finds in the source by file."""
    uses: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if found := pattern.findall(path.read_text()):
                uses[str(path.relative_to(ROOT))] = found
    return uses


def test_private_attributes_of_lightning_are_used_in_their_homes_only() -> None:
    uses = find_uses(_PRIVATE_OF_LIGHTNING, "recipes", "callbacks")
    outside = {name: found for name, found in uses.items() if name not in LIGHTNING_HOMES}
    assert not outside, f"give each a function in recipes/lightning_internals.py: {outside}"
    assert set(uses) == LIGHTNING_HOMES, "the pattern still finds the known ones"


def test_private_attributes_of_deepspeed_are_used_in_its_package_only() -> None:
    uses = find_uses(_PRIVATE_OF_DEEPSPEED, "recipes", "callbacks")
    outside = {name: found for name, found in uses.items() if not name.startswith(DEEPSPEED_HOME)}
    assert not outside, f"move them to {DEEPSPEED_HOME}: {outside}"
    assert uses, "the pattern still finds the known ones"


@pytest.mark.parametrize(
    "line",
    [
        "trainer._signal_connector.x",
        "self.trainer.fit_loop._should_accumulate()",
        "trainer.fit_loop.epoch_loop._batches_that_stepped = 3",
        "trainer.strategy._lightning_optimizers",
    ],
)
def test_the_pattern_finds_a_private_attribute_at_any_depth(line: str) -> None:
    assert _PRIVATE_OF_LIGHTNING.search(line)


@pytest.mark.parametrize("line", ["self._trainer.fit_loop", "trainer.__class__", "strategy.setup()"])
def test_the_pattern_ignores_public_attributes_and_those_of_self(line: str) -> None:
    assert not _PRIVATE_OF_LIGHTNING.search(line)


def test_a_trainer_calls_the_hooks_that_a_callback_has_and_passes_over_the_others() -> None:
    calls: list[str] = []

    class Watches(Callback):
        def on_train_batch_end(self, *arguments: Any, **options: Any) -> None:
            calls.append("end")

    class Counts(Profiler):
        def start(self, action_name: str) -> None:
            hook = action_name.rpartition(".")[2]
            if "Watches" in action_name and hook.startswith(("on_train_batch", "on_before_", "on_after_")):
                calls.append(hook)

        def stop(self, action_name: str) -> None: ...

    trainer = lightning.Trainer(
        callbacks=[Watches()],
        profiler=Counts(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    skip_empty_hooks(trainer)
    trainer.fit(BoringModel())
    assert calls == ["on_train_batch_end", "end"], "upstream calls every hook of every callback; no longer if fixed"
