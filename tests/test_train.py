"""Every command of README.md and the pages that this machine can run does, in a subprocess, as typed."""

import json
import os
import pydoc_data.topics
import shlex
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest
from doc_pages import BLOCKS, read_commands
from support import ROOT, read_metrics, run_train

RUN = [block for block in BLOCKS if block.language == "sh" and block.reason is None]
# what several pages name is run once
COMMANDS = [shlex.split(line) for line in dict.fromkeys(shlex.join(c) for block in RUN for c in read_commands(block))]
# what keeps a command to some seconds here; what it says itself stays
SHORT = [
    "trainer.max_steps=2",
    "global_batch_size=2",
    "eval_samples=2",
    "save_every=2",
    "warmup_steps=1",
    "callbacks.sample_text.num_tokens=8",
]
# trials take steps of the recipe as it is: a smaller one
SMALL_TRIAL = ["model.num_layers=1", "model.hidden_size=64", "model.num_heads=2", "seq_len=32", "global_batch_size=4"]
TRIALS = {
    "mode=preflight": ["mode.overfit_steps=10"],
    "mode=lr_find": ["mode.num_steps=20"],
    "mode=noise_scale": ["mode.num_steps=10"],
    "mode=batch_find": [],
}
# what it says itself, where that would take a minute: in proportion
SHORTER = {
    "scheduler.decay_steps=80": "scheduler.decay_steps=1",
    "trainer.max_steps=100": "trainer.max_steps=2",
    "trainer.max_steps=200": "trainer.max_steps=10",
    "save_every=20": "save_every=1",
    "checkpoint.keep_every=100": "checkpoint.keep_every=5",
    "global_batch_size=128": "global_batch_size=4",
    "global_batch_size=32": "global_batch_size=4",
    "micro_batch_size=8": "micro_batch_size=1",
}


def shortened(command: list[str]) -> list[str]:
    """A command with fewer steps, less data and a schedule that fits into it."""
    for trial in TRIALS.keys() & set(command):
        return [*command, *SMALL_TRIAL, *TRIALS[trial]]
    if "--help" in command or "--config-path" in command or any(w.startswith("mode=") for w in command):
        return command
    typed = {override.split("=")[0] for override in command}
    overrides = [override for override in SHORT if override.split("=")[0] not in typed]
    if "scheduler=torch" in command:  # which warms up as its class does
        overrides.remove("warmup_steps=1")
    if "callbacks.sample_text" in typed or any(
        override.startswith(("recipe=sft", "recipe=mixture")) for override in command
    ):
        overrides.remove("callbacks.sample_text.num_tokens=8")
    if any(override in ("model=gpt2", "model=llama_160m") for override in command):
        overrides += ["model.num_layers=2", "model.hidden_size=192", "model.num_heads=3", "seq_len=64"]
    return [SHORTER.get(override, override) for override in command] + overrides


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to type in, with text of one's own, raw tokens and a finished run in it."""
    folder = tmp_path_factory.mktemp("workplace")
    texts = folder / "my_texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text("".join(f"line {i * number}\n" for i in range(4000)))
    tokens = array("H", [*range(200)] * 2000).tobytes()
    (folder / "tokens.bin").write_bytes(tokens)
    (folder / "tokens").mkdir()
    for number in range(3):
        (folder / "tokens" / f"{number}.bin").write_bytes(tokens)
    (folder / "raw").mkdir()
    rows = [{"text": text, "kind": "prose"} for text in pydoc_data.topics.topics.values()]
    (folder / "raw" / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "questions.jsonl").write_text(json.dumps({"question": rows[0]["text"][:500]}) + "\n")
    # little text, as `mode=evaluate` reads the whole validation split
    done = run_train(["hydra.run.dir=logs/mine", "data=text_files", "data.path=my_texts", *SHORT], folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# sweeps that differ in nothing from others here and in tests/recipes/sweep, and plans of tests/recipes/plan
LONG = ("sweep=lr", "hydra.sweep.dir=logs/my_sweep", "expert_parallel_size=8", "optimizer=muon")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=" ".join(command), marks=[pytest.mark.slow] if set(LONG) & set(command) else [])
        for command in COMMANDS
    ],
)
def test_a_command_of_the_documentation_works(command: list[str], workplace: Path) -> None:
    done = run_train(shortened(command), folder=workplace)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_names_enough_commands_to_be_worth_testing() -> None:
    assert len(COMMANDS) >= 25


def test_a_run_prints_only_its_own_lines(workplace: Path) -> None:
    overrides = ["hydra.run.dir=logs/quiet", *SHORT[:-1], "tokenizer=bytes"]
    overrides += ["callbacks=[grad_norm,progress,throughput]"]
    done = run_train(overrides, folder=workplace)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "quickstart: run folder logs/quiet"
    assert lines[-1].startswith("Finished: 2 steps, train loss ")
    known = ("step", "quickstart:", "data:", "model:", "batch:", "Finished:")
    known += ("this processor has matrix units for bfloat16",)  # on those that have
    assert [line for line in lines if not line.lstrip().startswith(known)] == []
    assert (workplace / "logs/quiet/train.log").read_text() == done.stdout


def test_help_and_a_mistake_answer_without_torch_or_lightning(tmp_path: Path) -> None:
    """Slow imports are avoided; the time itself is measured in benchmarks/start.py."""
    program = (
        "import sys, runpy\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules), sys.modules\n"
        "sys.exit(code)\n"
    )
    for override, code in (("--help", 0), ("modle=gpt2", 2)):
        done = subprocess.run([sys.executable, "-c", program, override], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == code, done.stderr.decode()


def test_a_reader_of_the_help_that_has_seen_enough_gets_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `--help | head` does, before the first line instead of after the tenth
    done = subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, stdout=writing, stderr=-1, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_crash_names_the_folder_and_the_last_checkpoint_and_leaves_a_summary(
    workplace: Path,
) -> None:
    overrides = ["hydra.run.dir=logs/crash", *SHORT[:-1], "trainer.max_steps=6", "data=text_files"]
    broken = [
        "data.path=my_texts",
        "callbacks=[grad_norm]",
        "+callbacks.crash._target_=crash.Crash",
    ]
    (workplace / "crash.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Crash(Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if trainer.global_step == 5:\n"
        "            raise OSError('the disk is gone')\n"
    )
    env = os.environ | {"PYTHONPATH": str(workplace)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *overrides, *broken],
        cwd=workplace,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the disk is gone" in done.stdout
    last = "The run crashed; run folder: logs/crash, last valid checkpoint: step_0000004.ckpt"
    assert done.stdout.splitlines()[-1] == last
    assert '"status": "failed"' in (workplace / "logs/crash/summary.json").read_text()
    assert [row["step"] for row in read_metrics(workplace / "logs/crash")][-1] >= 4


def test_an_interrupted_run_ends_within_seconds_with_130(workplace: Path) -> None:
    overrides = ["hydra.run.dir=logs/interrupted", "tokenizer=bytes", "save_every=null"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step" in line and "loss" in line:
            break
    process.send_signal(2)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 130
    summary = (workplace / "logs/interrupted/summary.json").read_text()
    assert '"status": "interrupted"' in summary
