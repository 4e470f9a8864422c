"""Runs that really run out of memory: message, exit code, files, and that every suggested override composes."""

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT, TINY, execute

from recipes.config import compose_and_check
from recipes.entry.out_of_memory import (
    describe_out_of_memory,
    log_exit,
    remedies,
    write_error_report,
)
from recipes.runtime.exit_codes import ExitCode

LIMIT_BYTES = 16 * 2**30  # of address space; torch alone needs up to 4 GiB
FULL_ON_RANK_1 = """
import torch
from lightning.pytorch import Callback

class Full(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
"""


def run(folder: Path, *overrides: str, limit_bytes: int | None = None):
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    command = [sys.executable, "-m", "train", *TINY, "hydra.run.dir=run", *overrides]
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


def test_a_batch_that_does_not_fit_ends_with_71_and_overrides_that_reduce_memory(
    tmp_path: Path, text_folder: str
) -> None:
    # logits of 4096 samples of 32 tokens over a vocabulary of 50,000, 26 GB
    overrides = ["model.vocab_size=50000", "global_batch_size=4096", "trainer.max_steps=2", "loss_chunk_tokens=null"]
    overrides += [f"data.path={text_folder}", f"plan.memory_gib={LIMIT_BYTES / 2**30}"]
    done = run(tmp_path, *overrides, limit_bytes=LIMIT_BYTES)
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    # halving the micro-batch, or any other single override, does not suffice
    assert "Add one of these overrides" not in output
    assert "micro_batch_size=2048 " in output
    assert "activation_checkpoint=full" in output
    assert "precision=bf16-mixed" in output
    assert "offload" not in output, "host memory is full: nothing can be offloaded to it"
    # the logits, twice over: as they are and as the loss needs them
    planned = re.search(r"Plan: a rank needs ([0-9.]+) GiB .* of 16.00 GiB", output)
    assert planned is not None
    assert float(planned[1]) > 2 * 24
    advised = re.search(r"advice: strategy=single activation_checkpoint=none micro_batch_size=(\d+)\n", output)
    assert advised is not None
    assert 128 <= int(advised[1]) <= 1024
    assert [event["event"] for event in events(tmp_path)] == ["start", "oom", "end"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "out_of_memory"
    dump = (tmp_path / "run/oom/rank_00000.txt").read_text()
    assert "MiB  cpu  torch.float32  [4096, 32," in dump


def test_a_full_memory_on_another_rank_than_0_is_reported_too(tmp_path: Path, text_folder: str) -> None:
    (tmp_path / "full.py").write_text(FULL_ON_RANK_1)
    overrides = ["strategy=ddp", "trainer.devices=2", "+callbacks.full._target_=full.Full"]
    overrides += [f"data.path={text_folder}", "trainer.max_steps=4", "save_every=1"]
    done = run(tmp_path, *overrides)
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert output.count("Out of memory: CUDA out of memory. Tried to allocate 20.00 MiB") == 1
    assert "strategy=fsdp" in output
    assert "resume=run" in output
    assert "it fits, so something else fills the memory" in output  # the error is made up
    [full] = [event for event in events(tmp_path) if event["event"] == "oom"]
    assert (full["rank"], full["step"]) == (1, 2)
    ends = [event["status"] for event in events(tmp_path) if event["event"] == "end"]
    assert ends == ["out_of_memory"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "out_of_memory"
    assert (tmp_path / "run/oom/rank_00001.txt").exists()


def test_a_model_whose_state_cannot_fit_is_refused_before_it_is_allocated(
    tmp_path: Path, text_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocate(*_: object) -> None:
        raise AssertionError("the weights were to be allocated")

    typed = [*TINY, f"data.path={text_folder}", f"hydra.run.dir={tmp_path / 'run'}", "trainer.max_steps=1"]
    typed += ["plan.memory_gib=0.0005"]
    with monkeypatch.context() as patched:
        patched.setattr("recipes.strategy.single.SingleDevice.materialize", allocate)
        assert execute(*typed) == ExitCode.INVALID_CONFIG
    refused = capsys.readouterr().out
    assert "1. model=gpt2_nano strategy=single\n" in refused
    assert "type: precision=bf16-true, a smaller model=, more devices" in refused
    assert execute(*typed, "precision=bf16-true") == ExitCode.FINISHED
    num_parameters = re.search(r"model: GPT2, ([0-9,]+) parameters", capsys.readouterr().out)
    planned = re.search(r"take ([0-9.]+) MiB, even without activations, and this machine has 0.51 MiB, unless", refused)
    assert num_parameters is not None
    assert planned is not None
    # float32 weights and gradients, AdamW's two moments and its step counts, which are 100 bytes
    of_state = 16 * int(num_parameters[1].replace(",", "")) / 2**20
    assert float(planned[1]) == pytest.approx(of_state, abs=0.006)


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
def test_each_suggested_override_composes_with_the_command_line(recipe: str, tmp_path: Path) -> None:
    next_strategy, world_size = STAGES[recipe]
    typed = [f"recipe={recipe}", "trainer.accelerator=cpu", "micro_batch_size=8"]
    typed += [f"trainer.devices={world_size}", f"hydra.run.dir={tmp_path}"]
    composed, mistakes = compose_and_check(typed)
    assert composed is not None
    assert not mistakes
    suggested = [overrides for overrides, _ in remedies(composed)]
    assert suggested[:2] == ["micro_batch_size=4", "activation_checkpoint=full"]
    assert suggested[2] == next_strategy
    for overrides in suggested:
        # a folder that exists on this machine
        existing = overrides.replace("/local_nvme", str(tmp_path))
        _, mistakes = compose_and_check([*typed, *existing.split()])
        # a library that is not installed here is no mistake of the suggestion
        wrong = [str(mistake) for mistake in mistakes if " install " not in mistake.fix]
        assert not wrong, overrides


@pytest.mark.parametrize("recipe", STAGES)
def test_a_frozen_config_gets_the_same_suggestions(recipe: str, tmp_path: Path) -> None:
    _, world_size = STAGES[recipe]
    typed = [f"recipe={recipe}", "trainer.accelerator=cpu", f"trainer.devices={world_size}"]
    composed, _ = compose_and_check([*typed, f"hydra.run.dir={tmp_path}"])
    assert composed is not None
    frozen = replace(composed, choices={})
    assert [*remedies(frozen)] == [*remedies(composed)]


def test_the_event_of_another_rank_than_0_is_added_once_after_all_ranks_have_ended(
    tmp_path: Path,
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"time": 1.0, "step": 0, "event": "start"}\n')
    log_exit(tmp_path, file)
    write_error_report(tmp_path, rank=3, step=7, error="CUDA out of memory")
    (tmp_path / "oom/rank_00002.json").write_text("{")  # cut short by a full disk
    for _ in range(2):
        log_exit(tmp_path, file)
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    assert [event["event"] for event in logged] == ["start", "oom", "end"]
    assert (logged[1]["rank"], logged[2]["status"]) == (3, "out_of_memory")


def test_a_run_that_uses_every_override_already_gets_none(tmp_path: Path) -> None:
    typed = ["recipe=fsdp_bf16_offload", "trainer.accelerator=cpu", "trainer.devices=2"]
    typed += ["global_batch_size=2", "activation_checkpoint=full"]
    composed, _ = compose_and_check([*typed, f"hydra.run.dir={tmp_path}"])
    assert composed is not None
    assert not [*remedies(composed)]
    text = describe_out_of_memory(MemoryError("no more"), composed)
    assert "a device with more memory" in text
