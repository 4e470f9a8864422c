"""What is allowed and rarely meant is a line of the log before the run."""

import pytest

from recipes.config import compose_and_check
from recipes.config.check.doubts import find_doubts

SFT = "recipe=sft data.path=qa.jsonl"
RANDOM = "neither model.pretrained nor start_from is set, so it fine-tunes random weights at optimizer.lr="
PUBLISHED = "type model=huggingface model.name=<folder of a published model>, or start_from=<run folder>"


@pytest.mark.parametrize(
    ("typed", "doubts"),
    [
        (SFT, [f"model=gpt2_nano: {RANDOM}2e-05; {PUBLISHED}"]),
        (f"{SFT} adapter=lora", [f"adapter=lora model=gpt2_nano: {RANDOM}2e-05; {PUBLISHED}"]),
        ("adapter=dora", [f"adapter=dora model=gpt2_nano: {RANDOM}0.003; {PUBLISHED}"]),
        (f"{SFT} model=gpt2 model.pretrained=weights", []),
        (f"{SFT} start_from=logs/mine", []),
        ("recipe=sft_demo", []),
        ("", []),
        (
            "trainer.max_steps=35",
            [
                "warmup_steps=70 trainer.max_steps=35: the learning rate only rises, to 50% of optimizer.lr in the last"
                " step; type warmup_steps=3"
            ],
        ),
        ("trainer.max_steps=71", []),
        ("trainer.max_steps=35 scheduler=one_cycle", []),
        (
            "scheduler=plateau scheduler.patience=3 eval_every=100 trainer.max_steps=500",
            [
                "scheduler.patience=3 eval_every=100 trainer.max_steps=500: a reduction follows validation 5 at the"
                " earliest, and 4 come before the last step; type eval_every=99"
            ],
        ),
        ("scheduler=plateau scheduler.patience=3 eval_every=100 trainer.max_steps=501", []),
        (
            "scheduler=plateau eval_every=1000 trainer.max_steps=3 warmup_steps=0",
            [
                "scheduler.patience=10 eval_every=1000 trainer.max_steps=3: a reduction follows validation 12 at the"
                " earliest, and 0 come before the last step; type trainer.max_steps=13 or more, and eval_every=1"
            ],
        ),
    ],
)
def test_a_doubt_is_a_line_with_what_to_type(typed: str, doubts: list[str]) -> None:
    run, _ = compose_and_check(typed.split())
    assert run is not None
    assert [str(doubt) for doubt in find_doubts(run, is_continued=False)] == doubts


def test_a_run_that_goes_on_has_weights() -> None:
    run, _ = compose_and_check(SFT.split())
    assert run is not None
    assert [*find_doubts(run, is_continued=True)] == []
