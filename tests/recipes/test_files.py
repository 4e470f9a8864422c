"""Every file of a run under a full disk at its first, a middle and its last write; what was there stays as it was."""

import errno
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from full_disk import full_disk
from safetensors.torch import load_file, save_file
from support import TINY, read_metrics, write_texts

from recipes.checkpoint.manifest import find_fault
from recipes.checkpoint.retention import resolve_symlink, steps_on_disk
from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.files import LineFile, WriteError, append, filling, replace_end, replacing, write_atomically
from recipes.runtime.console import open_console

STEPS = 6
ROWS = ("metrics.csv", "events.jsonl", "samples.jsonl")
# the run is refused if they cannot be written: without them it could not be resumed
NEEDED = ("probe", "config.yaml", "environment.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
REASON = "File too large"  # what this kernel says where a real disk says that it has no space


class Ended(NamedTuple):
    """How a run ended, and what it printed."""

    exit_code: int
    console: str
    opened: Counter[str]
    rejected: Counter[str]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a run that writes every kind of file."""
    settings = [text for text in TINY if not text.startswith("~")]
    settings += [f"data.path={write_texts(tmp_path_factory.mktemp('texts'))}", "seq_len=16", "logger=[csv,tensorboard]"]
    settings += [f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu", "warmup_steps=1", "log_every=1"]
    settings += ["save_every=1", "eval_every=2", "checkpoint.async_save=false", "checkpoint.keep_last=6"]
    settings += ["callbacks.sample_text.every_n_steps=1", "callbacks.sample_text.num_tokens=2"]
    settings += ["callbacks.sample_text.prompts=[a]", "profile_steps=1", "callbacks.step_profiler.after=2"]
    settings += ["callbacks.loss_spike.snapshot_every=1", "callbacks.loss_spike.quarantine_steps=1"]
    settings += ["callbacks.loss_spike.snapshot_storage=disk"]
    return [*settings, "+callbacks.fault={_target_:faults.FaultAt,kind:nan_batch,step:3}"]


@pytest.fixture
def start(overrides: list[str]) -> Callable[..., Ended]:
    """Return a function that starts a run whose writes are rejected where `is_full(path, number)` says so."""

    def run(folder: Path, *more: str, is_full: Callable[[str, int], bool] = lambda path, number: False) -> Ended:
        composed, mistakes = compose_and_check([*overrides, *more, f"hydra.run.dir={folder}"])
        assert composed is not None, mistakes
        assert not mistakes
        output = io.StringIO()  # no file: the kernel would reject that, too
        with redirect_stdout(output), redirect_stderr(output), full_disk(folder, is_full) as disk:
            exit_code = run_resolved(composed)
            open_console()  # closes the log, as the end of the process does
        return Ended(exit_code, output.getvalue(), disk.opened, +disk.rejected)

    return run


def check_files(folder: Path, console: str) -> None:
    """Check that no file is torn, none is left over, and that nothing printed a traceback."""
    assert "Traceback" not in console
    assert "Logging error" not in console
    for path in folder.rglob("*"):
        assert not path.name.endswith((".tmp", ".trash")), path
        if path.suffix == ".jsonl":
            assert all(json.loads(line) for line in path.read_text().splitlines()), path
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".pt":
            torch.load(path, weights_only=True)
        elif path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
        elif path.suffix == ".html":
            assert path.read_text().endswith("</html>\n")
    for checkpoint in steps_on_disk(folder / "checkpoints").values():
        assert find_fault(checkpoint) is None


# each is written after another one of its group, and not at all if that fails
FOLLOWS = ("spikes/step/spike.json", "spikes/step/weights/rank_00000.safetensors", "profile/operators.json")


def test_a_run_goes_on_where_a_file_that_it_can_do_without_meets_a_full_disk(
    start: Callable[..., Ended], tmp_path: Path
) -> None:
    reference = start(tmp_path / "reference")
    assert reference.exit_code == 0
    num_writes = {path: count for path, count in reference.opened.items() if path not in (*NEEDED, ".lock")}
    known = "samples.jsonl events.jsonl metrics.csv summary.json report.html curves.png train.log tensorboard/"
    known += " snapshots .pt .gz run.pt manifest.json spike.json operators.json weights/rank_00000.safetensors"
    assert [name for name in known.split() if not any(name in path for path in num_writes)] == []
    losses = [str(row["train/loss"]) for row in read_metrics(tmp_path / "reference")]
    weights = load_file(tmp_path / "reference/checkpoints/last/rank_00000.safetensors")
    which = {
        "first": lambda path, number: number == int(path == "train.log"),  # which is opened once before its first line
        "last": lambda path, number: number == num_writes[path] - 1,
        "second half": lambda path, number: number >= num_writes[path] // 2,
        "first of those that follow": lambda path, number: number == 0 and path in FOLLOWS,
    }
    if "LONG_TESTS" in os.environ:  # set by `make test-long`
        which["middle"] = lambda path, number: number == num_writes[path] // 2
    rejected: Counter[str] = Counter()
    for name, is_full in which.items():
        folder = tmp_path / name.replace(" ", "_")
        ended = start(folder, is_full=lambda path, number, f=is_full: path in num_writes and f(path, number))
        check_files(folder, ended.console)
        rejected += ended.rejected
        saved = list(steps_on_disk(folder / "checkpoints"))
        assert ended.exit_code == (0 if STEPS in saved else 74), ended.console
        assert ended.console.count("Could not save") == STEPS - len(saved)
        assert resolve_symlink(folder / "checkpoints/last") == folder / f"checkpoints/step_{max(saved):07d}.ckpt"
        if name == "first of those that follow":
            continue
        # one line for each file that was not written, whose rows are named if they are missing at the end
        lines = Counter(line for line in ended.console.splitlines() if line.endswith("The run goes on"))
        assert set(lines.values()) == {1}, name
        for path in (*ROWS, "curves.png", "report.html", "summary.json", "train.log", "snapshots/rank_0"):
            assert lines[f"{folder}/{path} could not be written: {REASON}. The run goes on"] == 1, (name, path)
        if name == "second half":
            for lacks in ("metrics.csv lacks 3 rows, of steps 4 to 6", "samples.jsonl lacks its last 3 lines"):
                assert f"{folder}/{lacks}: {REASON}" in ended.console
            assert re.search(f"{folder}/train.log lacks its last \\d+ lines: {REASON}", ended.console)
            continue
        assert [str(row["train/loss"]) for row in read_metrics(folder)] == losses  # one is NaN
        assert (folder / "samples.jsonl").read_text() == (tmp_path / "reference/samples.jsonl").read_text()
        assert all(f"{folder}/{path} is written again" in ended.console for path in ROWS)
        if STEPS in saved:  # no bit of the training has changed
            found = load_file(folder / "checkpoints/last/rank_00000.safetensors")
            assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert num_writes.keys() <= rejected.keys()


def test_a_run_is_refused_where_a_file_that_it_needs_meets_a_full_disk(
    start: Callable[..., Ended], tmp_path: Path
) -> None:
    quiet = ["~callbacks.report", "~callbacks.step_profiler", "profile_steps=null", "logger=csv"]
    for number, needed in enumerate(("probe", "config.yaml", "tokenizer/tokenizer_config.json")):
        folder = tmp_path / f"run_{number}"
        ended = start(folder, *quiet, is_full=lambda path, number, needed=needed: path == needed)
        assert ended.exit_code == 2, ended.console
        check_files(folder, ended.console)
        assert re.search(f"hydra.run.dir={folder}\n.* cannot be written: {REASON}\n", ended.console), ended.console
        assert not (folder / "metrics.csv").exists()

    folder = tmp_path / "run"
    assert start(folder, *quiet).exit_code == 0
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("train.log", ".lock")]
    before = {path: path.read_bytes() for path in files}
    more = [*quiet, "resume=auto", "trainer.max_steps=8"]
    for needed in (*NEEDED, "events.jsonl"):
        ended = start(folder, *more, is_full=lambda path, number, needed=needed: path == needed)
        assert ended.exit_code == 2, (needed, ended.console)
        check_files(folder, ended.console)
        assert f"cannot be written: {REASON}" in ended.console
        changed = {path.name for path, content in before.items() if path.read_bytes() != content}
        assert changed <= {"config.yaml", "environment.json"} - {needed}, needed
    # everything else is full at the first write of the resume, and the run ends as if it were not
    ended = start(folder, *more, is_full=lambda path, number: path not in (*NEEDED, ".lock") and number == 0)
    assert "events.jsonl" in ended.console  # at a resume, the events that training repeats are dropped: see above
    assert ended.exit_code == 2
    ended = start(folder, *more, is_full=lambda path, number: path in ("metrics.csv", "samples.jsonl") and number == 0)
    assert ended.exit_code == 0, ended.console
    assert [row["step"] for row in read_metrics(folder)] == list(range(1, 9))
    check_files(folder, ended.console)


def test_lines_are_appended_whole_or_not_at_all_and_torn_ones_are_not_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"st')  # a killed run left this
    file = LineFile(path)
    with full_disk(tmp_path, lambda name, number: number in (0, 1)) as disk:
        file.append(['{"step": 2}'])
        assert path.read_text() == '{"step": 1}\n'
        file.append(['{"step": 3}'])
        file.append(['{"step": 4}'])
    assert disk.rejected["samples.jsonl"] == 2
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4))
    failed, again = caplog.messages
    assert failed == f"{path} could not be written: {REASON}. The run goes on"
    assert again == f"{path} is written again"
    log = tmp_path / "train.log"
    log.write_text("whole\nhalf")
    append(log, "next\n", keeps_torn=True)
    assert log.read_text() == "whole\nhalf\nnext\n"


def test_rows_that_were_there_survive_a_replacement_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,2.5\n")
    with full_disk(tmp_path, lambda name, number: True), pytest.raises(OSError, match=REASON) as raised:
        replace_end(path, "1,2.5,3.5\n2,1.5\n", 10)
    assert raised.value.filename == str(path)
    assert path.read_text() == "step,loss\n1,2.5\n"
    assert replace_end(path, "1,9\n", 10) == 14
    assert path.read_text() == "step,loss\n1,9\n"


def test_the_umask_decides_the_mode_of_a_file_whoever_writes_it(tmp_path: Path) -> None:
    """safetensors creates files that only their owner can read."""
    for mask in (0o022, 0o027, 0o002):
        before = os.umask(mask)
        try:
            with filling(tmp_path / f"export_{mask}") as folder:
                save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
            with replacing(tmp_path / "one.safetensors") as unfinished:
                save_file({"weight": torch.ones(2)}, unfinished)
            write_atomically(tmp_path / "config.yaml", "a: 1\n")
        finally:
            os.umask(before)
        for path in (f"export_{mask}/model.safetensors", "one.safetensors", "config.yaml"):
            assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o666 & ~mask, path
        assert stat.S_IMODE((tmp_path / f"export_{mask}").stat().st_mode) == 0o777 & ~mask


def test_a_folder_is_filled_completely_or_keeps_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    (folder / "notes.txt").write_text("mine")

    def fill() -> None:
        with filling(folder) as unfinished:
            (unfinished / "config.json").write_text("new")
            with (unfinished / "model.safetensors").open("wb"):  # seen, which makes the disk full
                save_file({"weight": torch.ones(2)}, unfinished / "model.safetensors")

    is_full = lambda name, number: name.endswith("model.safetensors")  # noqa: E731
    with full_disk(tmp_path, is_full), pytest.raises(OSError, match=REASON) as raised:
        fill()
    assert raised.value.filename == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt"]
    assert (folder / "config.json").read_text() == "old"
    with filling(folder) as unfinished:
        (unfinished / "config.json").write_text("new")
    assert (folder / "config.json").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt"]


def test_a_filled_folder_loses_owned_files_that_the_new_one_lacks_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    (folder / "templates").mkdir(parents=True)
    for name in ("model-1-of-2.bin", "model-2-of-2.bin", "model_mine.bin", "templates/tool"):
        (folder / name).write_text("old")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    with filling(folder, owned=["model-*-of-*.bin", "templates", "gone", "absent"]) as unfinished:
        (unfinished / "model-1-of-2.bin").write_text("new")
    assert sorted(path.name for path in folder.iterdir()) == ["model-1-of-2.bin", "model_mine.bin"]
    assert (folder / "model-1-of-2.bin").read_text() == "new"


def test_ranks_that_fill_one_folder_at_the_same_time_do_not_remove_each_others_files(tmp_path: Path) -> None:
    with ExitStack() as ranks:
        folders = [ranks.enter_context(filling(tmp_path, writer=f"rank_{rank}")) for rank in range(3)]
        for rank, folder in enumerate(folders):
            (folder / f"trace_{rank}").write_text("old" if rank else "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_0", "trace_1", "trace_2"]
    left = tmp_path / ".unfinished.rank_1.tmp"  # by a killed rank
    left.mkdir()
    (left / "half").touch()
    with filling(tmp_path, writer="rank_1") as folder:
        (folder / "trace_1").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_0", "trace_1", "trace_2"]
    assert (tmp_path / "trace_1").read_text() == "new"


def test_processes_that_write_one_file_at_the_same_time_leave_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with replacing(path, is_shared=True) as first, replacing(path, is_shared=True) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the outer one ends last
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_failed_write_is_a_write_error(tmp_path: Path) -> None:
    """A disk that fails gives reads the same number, EIO."""
    path = tmp_path / "result.json"
    with pytest.raises(WriteError) as raised, replacing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    with pytest.raises(OSError, match="shard") as read, replacing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "shard.bin"))
    assert type(read.value) is OSError
