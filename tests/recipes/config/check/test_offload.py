"""Offload settings that a strategy does not have: the message offers what exists instead."""

import os
import shlex
from pathlib import Path

import pytest

from recipes.config import compose_and_check

FSDP = "strategy=fsdp strategy.cpu_offload=true"
NVME = "strategy=deepspeed_stage_3_nvme strategy.nvme_path=<folder>"
# strategy, override: why, what to type
MISPLACED = {
    ("ddp", "cpu_offload=true"): (
        "strategy=ddp keeps everything on its devices",
        f"{FSDP}, or strategy=deepspeed_stage_2_offload",
    ),
    ("single", "cpu_offload=true"): (
        "strategy=single keeps everything on its devices",
        f"{FSDP}, or strategy=deepspeed_stage_2_offload",
    ),
    ("ddp", "offload_optimizer=cpu"): (
        "strategy=ddp keeps everything on its devices",
        f"strategy=deepspeed_stage_2_offload, or {FSDP}",
    ),
    ("single", "offload_parameters=cpu"): (
        "strategy=single keeps everything on its devices",
        f"strategy=deepspeed_stage_3_offload, or {FSDP}",
    ),
    ("ddp", "offload_optimizer=nvme"): ("strategy=ddp does not use a disk", NVME),
    ("ddp", "nvme_path=/disk"): (
        "strategy=ddp does not use a disk",
        "strategy=deepspeed_stage_3_nvme strategy.nvme_path=/disk",
    ),
    ("fsdp", "offload_optimizer=cpu"): (
        "strategy=fsdp offloads weights, gradients and optimizer state together",
        "strategy.cpu_offload=true",
    ),
    ("hsdp", "offload_parameters=cpu"): (
        "strategy=hsdp offloads weights, gradients and optimizer state together",
        "strategy.cpu_offload=true",
    ),
    ("fsdp", "nvme_path=/disk"): (
        "strategy=fsdp does not use a disk",
        "strategy=deepspeed_stage_3_nvme strategy.nvme_path=/disk",
    ),
    ("deepspeed_stage_1", "cpu_offload=true"): (
        "strategy=deepspeed_stage_1 has settings of its own for it",
        "strategy.offload_optimizer=cpu",
    ),
    ("deepspeed_stage_2", "cpu_offload=true"): (
        "strategy=deepspeed_stage_2 has settings of its own for it",
        "strategy=deepspeed_stage_2_offload",
    ),
    ("deepspeed_stage_3_offload", "cpu_offload=true"): (
        "strategy=deepspeed_stage_3 offloads already",
        "the same command without strategy.cpu_offload",
    ),
}
ZERO = {
    "strategy=deepspeed_stage_2 strategy.offload_parameters=cpu": (
        "strategy.offload_parameters=cpu: strategy=deepspeed_stage_2 keeps all parameters on every rank;"
        " type strategy=deepspeed_stage_3_offload"
    ),
    "strategy=deepspeed_stage_1 strategy.offload_parameters=nvme": (
        f"strategy.offload_parameters=nvme: strategy=deepspeed_stage_1 keeps all parameters on every rank; type {NVME}"
    ),
    "strategy=deepspeed_stage_2 strategy.offload_optimizer=nvme": (
        "strategy.offload_optimizer=nvme: strategy=deepspeed_stage_2 offloads to host memory only;"
        f" type strategy.offload_optimizer=cpu, or {NVME}"
    ),
    "strategy=deepspeed_stage_3_nvme": (
        "strategy.offload_optimizer=nvme strategy.offload_parameters=nvme: no folder on an NVMe disk is set;"
        " type strategy.nvme_path=<folder>"
    ),
    "strategy=deepspeed_stage_3_nvme strategy.nvme_path=no/such": (
        "strategy.nvme_path=no/such: there is no such folder; type strategy.nvme_path=<folder>"
    ),
    "strategy=deepspeed_stage_2_offload strategy.nvme_path=/disk": (
        "strategy.nvme_path=/disk: nothing is offloaded to it;"
        " type strategy=deepspeed_stage_3_nvme strategy.nvme_path=/disk"
    ),
}


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize(("strategy", "override"), MISPLACED)
def test_a_misplaced_offload_setting_is_answered_with_the_strategy_that_has_it(
    strategy: str, override: str, plus: str
) -> None:
    why, fix = MISPLACED[strategy, override]
    _, mistakes = compose_and_check([f"{plus}strategy.{override}", f"strategy={strategy}"])
    [mistake] = mistakes
    typed = mistake.setting.removeprefix("+")
    assert (typed, mistake.reason, mistake.fix) == (f"strategy.{override}", why, fix)


@pytest.mark.parametrize("typed", ZERO)
def test_a_zero_stage_offloads_only_what_it_partitions_to_a_folder_that_exists(typed: str) -> None:
    _, mistakes = compose_and_check(shlex.split(typed))
    assert [str(mistake) for mistake in mistakes] == [ZERO[typed]]


def test_the_disks_folder_must_take_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["strategy=deepspeed_stage_3_nvme", f"strategy.nvme_path={tmp_path}"]
    assert compose_and_check(typed)[1] == []
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    assert [str(mistake) for mistake in compose_and_check(typed)[1]] == [
        f"strategy.nvme_path={tmp_path}: the folder cannot be written to; type strategy.nvme_path=<folder>"
    ]


def test_asking_for_no_offload_offers_none() -> None:
    _, mistakes = compose_and_check(["strategy=ddp", "strategy.cpu_offload=false"])
    assert [mistake.fix for mistake in mistakes] == ["the same command without strategy.cpu_offload"]


def test_a_recipe_that_offloads_says_so_under_another_strategy() -> None:
    _, mistakes = compose_and_check(["recipe=fsdp_bf16_offload", "strategy=ddp"])
    assert [mistake.reason for mistake in mistakes] == ["strategy=ddp keeps everything on its devices"]


@pytest.mark.parametrize("strategy", ["single", "fsdp", "deepspeed_stage_2", "hsdp"])
def test_a_strategy_typed_beside_a_recipe_replaces_its_own(strategy: str) -> None:
    composed, mistakes = compose_and_check(["recipe=ddp_bf16", f"strategy={strategy}"])
    assert composed is not None
    assert mistakes == []
    assert (composed.choices["strategy"], composed.config["name"]) == (strategy, "ddp_bf16")
