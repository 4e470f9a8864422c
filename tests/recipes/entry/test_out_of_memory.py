"""Memory that is full, really: what is said, what is left, and that what it says to type can be typed."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT, TINY

from recipes.config import compose_and_check
from recipes.entry.out_of_memory import (
    describe_out_of_memory,
    log_exit,
    remedies,
    write_error_report,
)
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import is_out_of_memory

LIMIT_BYTES = 16 * 2**30  # of address space, of which torch takes 4 at most
FULL_ON_RANK_1 = """
import torch
from lightning.pytorch import Callback

class Full(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
"""


def run(folder: Path, *words: str, limit_bytes: int | None = None):
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    command = [sys.executable, "-m", "train", *TINY, "hydra.run.dir=run", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=limit,
    )


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]


def test_a_batch_that_does_not_fit_ends_with_71_and_words_to_type(
    tmp_path: Path, text_folder: str
) -> None:
    # logits of 4096 samples of 32 tokens over 50,000 words, 26 GB
    words = ["model.vocab_size=50000", "global_batch_size=4096", "trainer.max_steps=2"]
    words += [f"data.path={text_folder}"]
    done = run(tmp_path, *words, limit_bytes=LIMIT_BYTES)
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "micro_batch_size=2048 " in said
    assert "the same global batch in 2 passes" in said
    assert "activation_checkpoint=every_block" in said
    assert "precision=bf16-mixed" in said  # the host is full: nothing can be moved there
    assert "strategy=" not in said
    assert [event["event"] for event in events(tmp_path)] == ["start", "oom", "end"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "out_of_memory"
    picture = (tmp_path / "run/oom/rank_00000.txt").read_text()
    assert "MiB  cpu  torch.float32  [4096, 32," in picture


def test_another_rank_than_the_first_is_heard_too(tmp_path: Path, text_folder: str) -> None:
    (tmp_path / "full.py").write_text(FULL_ON_RANK_1)
    words = ["strategy=ddp", "trainer.devices=2", "+callbacks.full._target_=full.Full"]
    words += [f"data.path={text_folder}", "trainer.max_steps=4", "save_every=1"]
    done = run(tmp_path, *words)
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert said.count("Out of memory: CUDA out of memory. Tried to allocate 20.00 MiB") == 1
    assert "strategy=fsdp" in said
    assert "resume=run" in said
    [told] = [event for event in events(tmp_path) if event["event"] == "oom"]
    assert (told["rank"], told["step"]) == (1, 2)
    ends = [event["status"] for event in events(tmp_path) if event["event"] == "end"]
    assert ends == ["out_of_memory"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "out_of_memory"
    assert (tmp_path / "run/oom/rank_00001.txt").exists()


STAGES = {
    "single_fp32": ("strategy=fsdp strategy.cpu_offload=true", 1),
    "ddp_bf16": ("strategy=fsdp", 2),
    "hsdp_bf16": ("strategy=fsdp", 2),
    "fsdp_bf16": ("strategy.cpu_offload=true", 2),
    "zero1_bf16": ("strategy=deepspeed_stage_2", 2),
    "zero2_bf16": ("strategy=deepspeed_stage_3", 2),
    "zero2_bf16_offload": ("strategy=deepspeed_stage_3_offload", 2),
    "zero3_bf16": ("strategy=deepspeed_stage_3_offload", 2),
    "zero3_bf16_offload": (
        "strategy=deepspeed_stage_3_nvme strategy.nvme_path=/local_nvme",
        2,
    ),
}


@pytest.mark.parametrize("recipe", STAGES)
def test_each_way_out_can_be_typed_beside_what_was_typed(recipe: str, tmp_path: Path) -> None:
    word, world_size = STAGES[recipe]
    typed = [f"recipe={recipe}", "trainer.accelerator=cpu", "micro_batch_size=8"]
    typed += [f"trainer.devices={world_size}", f"hydra.run.dir={tmp_path}"]
    composed, mistakes = compose_and_check(typed)
    assert composed is not None
    assert not mistakes
    ways = [words for words, _ in remedies(composed, world_size=world_size)]
    assert ways[:2] == ["micro_batch_size=4", "activation_checkpoint=every_block"]
    assert ways[2] == word
    for words in ways:
        if "nvme" in words:  # a folder that this machine has
            words = words.replace("/local_nvme", str(tmp_path))
        _, found = compose_and_check([*typed, *words.split()])
        missing = [one for one in found if "pip install" not in one.fix]
        assert not missing, (words, [str(one) for one in found])


@pytest.mark.parametrize("recipe", STAGES)
def test_a_frozen_config_has_the_same_ways_out(recipe: str, tmp_path: Path) -> None:
    _, world_size = STAGES[recipe]
    typed = [f"recipe={recipe}", "trainer.accelerator=cpu", f"trainer.devices={world_size}"]
    composed, _ = compose_and_check([*typed, f"hydra.run.dir={tmp_path}"])
    assert composed is not None
    frozen = replace(composed, choices={})
    assert [*remedies(frozen, world_size=world_size)] == [
        *remedies(composed, world_size=world_size)
    ]


def test_the_word_of_a_rank_that_nobody_could_tell_is_told_in_the_end(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"time": 1.0, "step": 0, "event": "start"}\n')
    log_exit(tmp_path, file)
    write_error_report(tmp_path, rank=3, step=7, error="CUDA out of memory")
    (tmp_path / "oom/rank_00002.json").write_text("{")  # of a full disk
    for _ in range(2):
        log_exit(tmp_path, file)
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [event["event"] for event in told] == ["start", "oom", "end"]
    assert (told[1]["rank"], told[2]["status"]) == (3, "out_of_memory")


def test_a_run_that_does_everything_already_has_no_way_out_to_type(tmp_path: Path) -> None:
    typed = ["recipe=fsdp_bf16_offload", "trainer.accelerator=cpu", "trainer.devices=2"]
    typed += ["global_batch_size=2", "activation_checkpoint=every_block"]
    composed, _ = compose_and_check([*typed, f"hydra.run.dir={tmp_path}"])
    assert composed is not None
    assert not [*remedies(composed, world_size=2)]
    text = describe_out_of_memory(MemoryError("no more"), composed, world_size=2)
    assert "a device with more memory" in text


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_memory_that_is_full_is_told_from_other_errors(error: Exception, is_full: bool) -> None:
    assert is_out_of_memory(error) is is_full
    wrapped = ValueError("a step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is is_full
