"""Every setting that cannot work is rejected with the override that fixes it."""

from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.config.check.callbacks import check_loss_spike, num_parameters_at_least

OVERRIDES = ["model=gpt2_nano"]


def mistakes(*overrides: str) -> list[str]:
    _, found = compose_and_check([*OVERRIDES, *overrides])
    return [str(mistake) for mistake in found]


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["callbacks.loss_spike.window=32"], "callbacks.loss_spike.window=64"),
        (
            ["callbacks.loss_spike.max_rollbacks=0"],
            "callbacks.loss_spike.max_rollbacks=<at least 1>",
        ),
        (
            ["callbacks.loss_spike.num_snapshots=1"],
            "callbacks.loss_spike.num_snapshots=<at least 2>",
        ),
        (
            ["callbacks.loss_spike.quarantine_steps=80"],
            "callbacks.loss_spike.quarantine_steps=50",
        ),
        (
            ["callbacks.loss_spike.snapshot_storage=gpu"],
            "callbacks.loss_spike.snapshot_storage=",
        ),
        (
            ["callbacks.loss_spike.lr_factor=1.5"],
            "callbacks.loss_spike.lr_factor=<above 0 and below 1>",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_answered_with_its_fix(overrides: list[str], fix: str) -> None:
    [mistake] = mistakes(*overrides)
    assert fix in mistake
    assert overrides[0].split("=")[0] in mistake


def test_snapshots_larger_than_the_memory_of_the_machine_must_go_to_disk(tmp_path: Path) -> None:
    composed, found = compose_and_check(
        [
            "model=gpt2_xl",
            "callbacks.loss_spike.snapshot_storage=memory",
            "strategy=ddp",
            "trainer.devices=2",
        ]
    )
    assert composed is not None, [str(mistake) for mistake in found]
    meminfo = tmp_path / "meminfo"
    # 1.56 billion parameters x 12 bytes x 2 snapshots x 2 ranks: 70 GiB
    for gib, expected in ((69, 1), (71, 0)):
        meminfo.write_text(f"MemTotal:       {gib * 2**20} kB\n")
        messages = [str(mistake) for mistake in check_loss_spike(composed, world_size=2, meminfo=meminfo)]
        assert len(messages) == expected
        assert all("callbacks.loss_spike.snapshot_storage=disk" in message for message in messages)


@pytest.mark.parametrize("name", ["gpt2_nano", "gpt2", "llama_160m", "llama_1b"])
def test_the_lower_bound_is_three_quarters_of_the_model_or_more(name: str) -> None:
    import torch
    from hydra.utils import instantiate

    composed, found = compose_and_check([f"model={name}", "tokenizer=bytes"])
    assert composed is not None, [str(mistake) for mistake in found]
    with torch.device("meta"):
        model = instantiate(composed.config["model"], _convert_="all")
    true = sum(parameter.numel() for parameter in model.parameters())
    bound = num_parameters_at_least(composed.config["model"])
    assert bound is not None
    assert 0.75 * true < bound <= true
