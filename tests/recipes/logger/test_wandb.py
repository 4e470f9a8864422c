"""Real offline W&B runs, read back with W&B's own reader: every row once, and how each run ended."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import ROOT, TINY, read_metrics, write_texts
from wandb_server import KEY, serving

from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.logger.wandb.logger import Alerts, WandbExit, WandbLogger, classes_table
from recipes.logger.wandb.session import ID_FILE, STEP, SentRows

Record = dict[str, Any]
WANDB_COLUMNS = ("_step", "_runtime", "_timestamp")


@pytest.fixture(autouse=True, scope="module")
def no_wandb_account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide a home without an API key and an environment without W&B variables."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.delenv("NETRC", raising=False)
        patch.setenv("HOME", str(home))
        yield home


def records_of(wandb_folder: Path) -> list[list[Record]]:
    """Read the records of each process of a run with W&B's own reader, the oldest process first."""
    processes = []
    for path in sorted(wandb_folder.glob("*run-*/run-*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=wandb_folder)
        processes.append([json.loads(line) for line in done.stdout.splitlines()])
    return processes


def find_rows(records: list[Record]) -> list[Record]:
    """Return the history rows without the columns that W&B adds."""
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{k: v for k, v in row.items() if k not in WANDB_COLUMNS} for row in rows]


def summary_of(records: list[Record]) -> Record:
    """Return the newest value of everything in the summary."""
    summary: Record = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    return summary


def get_exit_code(records: list[Record]) -> int | None:
    """Return the exit code that a process reported; None if it reported none."""
    exits = [record["exit"] for record in records if record["type"] == "exit"]
    return exits[-1].get("exit_code", 0) if exits else None


def one_of(records: list[Record], kind: str) -> Record:
    """Return the only record of a kind."""
    [record] = [record for record in records if record["type"] == kind]
    content: Record = record[kind]
    return content


def get_overrides(folder: Path) -> list[str]:
    """Return the overrides of a run with W&B: eight steps of two micro-batches."""
    texts = write_texts(folder.parent / "texts")
    overrides = [*TINY, f"data.path={texts}", "trainer.accelerator=cpu", "logger=wandb"]
    overrides += ["trainer.max_steps=8", "warmup_steps=1", "save_every=2", "eval_every=4"]
    return [*overrides, f"hydra.run.dir={folder}", "micro_batch_size=4"]


def train_in_process(*overrides: str) -> int:
    """Train in this process and return the exit code."""
    composed, errors = compose_and_check(overrides)
    assert composed is not None, [str(error) for error in errors]
    return run_resolved(composed)


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train in a process whose standard input is closed."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=folder.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def round_as_csv(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Round to the nine digits of metrics.csv."""
    return [{name: float(f"{value:.9g}") for name, value in row.items()} for row in rows]


def assert_same_rows(rows: list[Record], folder: Path) -> None:
    """Check that each row of metrics.csv is one row of W&B: same columns, same values in nine digits."""
    expected = [
        {STEP if name == "step" else name: value for name, value in row.items()} for row in read_metrics(folder)
    ]
    assert round_as_csv(rows) == expected


def test_a_run_without_a_key_is_logged_offline_one_row_per_step(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    settings = ["top_k: 8", "top_p: null", "temperature: 1.0", "every_n_steps: 4", "num_tokens: 8"]
    text = f"_target_: callbacks.sample_text.SampleText, prompts: [abc], {', '.join(settings)}"
    sampling = f"+callbacks.sample_text={{{text}}}"
    process = train(folder, *get_overrides(folder), "tags=[mine]", sampling)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stderr == ""
    wandb_lines = [line for line in process.stdout.splitlines() if "W&B" in line]
    assert wandb_lines == [
        f"W&B: there is no API key, so this run is kept offline; to upload it: wandb sync {folder}/wandb/offline-run-*"
    ]
    [records] = records_of(folder / "wandb")
    rows = find_rows(records)
    assert [row[STEP] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert_same_rows(rows, folder)
    assert {"train/loss", "lr", "grad/norm", "time/step_seconds", "val/loss"} <= set(rows[3])
    globs = [record["metric"] for record in records if record["type"] == "metric"]
    assert [glob["step_metric"] for glob in globs if glob.get("glob_name") == "*"] == [STEP]

    run = one_of(records, "run")
    assert run["run_id"] == json.loads((folder / ID_FILE).read_text())["id"]
    assert (run["run_group"], run["display_name"]) == ("quickstart_GPT2", "quickstart_GPT2_plain")
    assert run["tags"] == ["quickstart", "GPT2", "SingleDevice", "mine"]
    environment = json.loads((folder / "environment.json").read_text())
    if environment["git"] is not None:
        assert run["git"]["commit"] == environment["git"]["commit"]
    config = one_of(records, "config")["update"]
    assert (config["optimizer"]["lr"], config["model"]["hidden_size"], config["seed"]) == (
        0.003,
        32,
        1234,
    )
    assert config["environment"] == environment

    summary = summary_of(records)
    in_folder = json.loads((folder / "summary.json").read_text())
    assert {name: summary[name] for name in in_folder} == in_folder
    assert summary["checkpoint"] == str(folder / "checkpoints" / "step_0000008.ckpt")
    files = next((folder / "wandb").glob("offline-run-*/files"))
    samples = json.loads((files / summary["table/samples"]["path"]).read_text())
    assert [row[:2] for row in samples["data"]] == [[4, "abc"], [8, "abc"]]
    events = json.loads((files / summary["table/events"]["path"]).read_text())
    lines = [json.loads(line) for line in (folder / "events.jsonl").open()]
    assert [row[1] for row in events["data"]] == [line["event"] for line in lines]
    validations = json.loads((files / summary["table/validation"]["path"]).read_text())
    columns = validations["columns"]
    assert [dict(zip(columns, row, strict=True)) for row in validations["data"]] == [
        {name: pytest.approx(row[name]) for name in columns} for row in read_metrics(folder) if "val/loss" in row
    ]
    assert (summary["status"], get_exit_code(records)) == ("finished", 0)


@pytest.mark.slow
@pytest.mark.fresh_python  # W&B learns the exit code at the end of an interpreter
def test_a_preempted_and_resumed_run_on_two_ranks_is_one_wandb_run_with_every_row_once(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    signals = "+callbacks.signals={_target_: signalled.SignalAt, folder: ranks,"
    overrides = [*get_overrides(folder), f"{signals} signals: [step_3_SIGTERM_0]}}", "resume=auto"]
    overrides += ["strategy=ddp", "trainer.devices=2", "micro_batch_size=2"]
    stopped, finished = train(folder, *overrides), train(folder, *overrides)
    assert (stopped.returncode, finished.returncode) == (75, 0), stopped.stdout + finished.stdout
    first, second = records_of(folder / "wandb")
    assert one_of(first, "run")["run_id"] == one_of(second, "run")["run_id"]
    assert one_of(second, "run")["resume"] is True
    assert (get_exit_code(first), get_exit_code(second)) == (75, 0)
    assert [record["type"] for record in first].count("preempting") == 1
    assert [summary_of(records)["status"] for records in (first, second)] == [
        "preempted",
        "finished",
    ]
    rows, rows_after = find_rows(first), find_rows(second)
    if rows_after[0][STEP] == rows[-1][STEP]:  # the validation that the signal did not wait for
        assert not set(rows_after[0]) & set(rows[-1]) - {STEP}
        rows[-1] |= rows_after.pop(0)
    assert_same_rows(rows + rows_after, folder)


def test_a_crashed_then_killed_then_finished_run_is_one_wandb_run_with_every_step_once(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    crash = "+callbacks.crash={_target_: support.CrashAt, step: 3}"
    kill = "+callbacks.kill={_target_: signalled.SignalAt, folder: killed,"
    assert train_in_process(*get_overrides(folder), crash) == 1
    overrides = [f"resume={folder}", "~callbacks.crash"]
    # 3.2 s per step: every row that is handed over is older than the second in which W&B writes it down
    killed = train(folder, *overrides, f"{kill} signals: [batch_6_SIGKILL_0], pause: 1.6}}")
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert train_in_process(f"resume={folder}", "~callbacks.kill") == 0

    crashed, killed_at, last = records_of(folder / "wandb")
    [run_id] = {one_of(records, "run")["run_id"] for records in (crashed, killed_at, last)}
    assert run_id == json.loads((folder / ID_FILE).read_text())["id"]
    assert (get_exit_code(crashed), summary_of(crashed)["status"]) == (1, "failed")
    assert (get_exit_code(killed_at), summary_of(killed_at)["status"]) == (None, "running")
    assert (get_exit_code(last), summary_of(last)["status"]) == (0, "finished")
    every = [find_rows(records) for records in (crashed, killed_at, last)]
    steps = [row[STEP] for rows in every for row in rows]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row[STEP] for row in every[0]] == [1, 2, 3]
    assert every[1]
    losses = [row["train/loss"] for rows in every for row in rows]
    assert round_as_csv([{"": loss} for loss in losses]) == [{"": row["train/loss"]} for row in read_metrics(folder)]
    # uploaded as the log line says, they are one run whose own step count only rises
    with serving() as server:
        files = [str(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]
        subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", *files],
            env=os.environ | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.base_url},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            timeout=60,
        )
        assert server.steps(run_id) == [(step - 1, step) for step in range(1, 9)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a run folder as it is when training starts."""
    node = {"_target_": "somewhere.Something"}
    config = {"name": "run", "tags": [], "model": node, "strategy": node, "optimizer": {"lr": 0.1}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "environment.json").write_text(json.dumps({"overrides": []}))
    return tmp_path


def make_logger(folder: Path, **settings: Any) -> WandbLogger:
    defaults: dict[str, Any] = {
        "project": None,
        "entity": None,
        "group": None,
        "alert_every_minutes": 30,
        "upload_checkpoint": False,
        "init_timeout_seconds": 15,
        "finish_timeout_seconds": 60,
    }
    return WandbLogger(run_folder=folder, **defaults | settings)


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_recipes")
    log.addHandler(handler)
    with caplog.at_level(logging.INFO, logger="lightning_recipes"):
        yield lines
    log.removeHandler(handler)


def log_steps(logger: WandbLogger, *steps: int, loss: float = 0.0) -> None:
    for step in steps:
        logger.log_metrics({"train/loss": step + loss}, step=step - 1)


def test_rolled_back_steps_stay_and_the_repeated_ones_follow_with_marks_and_one_alert_per_kind(
    folder: Path,
) -> None:
    logger = make_logger(folder)
    logger.log_event("start", 0)
    log_steps(logger, 1, 2, 3)
    logger.log_metrics({"of_module": 5.0})  # without a step: in the newest row
    for series in ("loss", "norm"):
        logger.log_event("spike", 3, series=series, value=9.0)
    logger.on_rollback(None, None, 3, 1)
    logger.log_event("rollback", 1, **{"from": 3})
    log_steps(logger, 2, 3, loss=0.5)
    logger.finalize("success")
    logger.log_event("stop", 3, why="it goes on")
    logger.log_event("end", 3, status="diverged", error="Diverged at step 3")
    [records] = records_of(folder / "wandb")
    assert find_rows(records) == [
        {STEP: 1, "train/loss": 1},
        {STEP: 2, "train/loss": 2},
        {STEP: 3, "train/loss": 3, "of_module": 5, "event/spike": 1},
        {STEP: 2, "train/loss": 2.5, "event/rollback": 1},
        {STEP: 3, "train/loss": 3.5},
    ]
    counts = [r["history"]["item"]["_step"] for r in records if r["type"] == "history"]
    assert counts == [0, 1, 2, 3, 4]
    alerts = [record["alert"]["title"] for record in records if record["type"] == "alert"]
    assert alerts == ["Spike", "Rollback", "Diverged"]
    assert (summary_of(records)["status"], get_exit_code(records)) == ("diverged", 3)


def test_a_run_that_began_without_wandb_brings_its_rows_along(folder: Path) -> None:
    lines = ["step,train/loss,val/loss", "1,1,", "2,2,2.5", "3,3,"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    logger = make_logger(folder)
    logger.resume_at(2)
    logger.log_event("resume", 2)
    log_steps(logger, 3)
    logger.log_event("end", 3, status="finished")
    [records] = records_of(folder / "wandb")
    assert find_rows(records) == [
        {STEP: 1, "train/loss": 1},
        {STEP: 2, "train/loss": 2, "val/loss": 2.5},
        {STEP: 3, "train/loss": 3},
    ]


def test_rows_sent_before_a_crash_are_not_sent_again_but_a_late_validation_of_the_last_is(
    folder: Path,
) -> None:
    before = make_logger(folder)
    before.log_event("start", 0)
    log_steps(before, 1, 2, 3, 4)
    before.finalize("failed")
    before.log_event("end", 4, status="failed", error="gone")
    saved = folder / "checkpoints" / "step_0000004.ckpt"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "last").symlink_to(saved.name)
    after = make_logger(folder, upload_checkpoint=True)
    after.resume_at(1)
    after.log_event("resume", 1)
    log_steps(after, 2, 3, 4)
    after.log_metrics({"val/loss": 7.0}, step=3)  # the crash came before the validation
    log_steps(after, 5)
    after.finalize("success")
    after.log_event("end", 5, status="finished")
    _, records = records_of(folder / "wandb")
    assert find_rows(records) == [{STEP: 4, "val/loss": 7}, {STEP: 5, "train/loss": 5}]
    record = json.loads((folder / ID_FILE).read_text())
    assert (record["step"], record["columns"]) == (5, ["train/loss", STEP])
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    run_id = one_of(records, "run")["run_id"]
    assert [artifact["name"] for artifact in artifacts] == [f"checkpoint-{run_id}"]


def test_a_resume_without_the_id_file_continues_the_run_of_its_checkpoint(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,train/loss\n1,1\n2,2\n")
    after = make_logger(folder)
    saved = {"loggers": {"WandbLogger": "abcd1234"}}
    checkpoint = folder / "checkpoints" / "step_0000002.ckpt"
    after.on_load_checkpoint(SimpleNamespace(ckpt_path=str(checkpoint)), None, saved)
    after.resume_at(2)
    after.log_event("resume", 2)
    log_steps(after, 3)
    after.log_event("end", 3, status="finished")
    [records] = records_of(folder / "wandb")
    assert one_of(records, "run")["run_id"] == "abcd1234"
    assert find_rows(records) == [{STEP: 3, "train/loss": 3}]


def test_wandb_run_json_names_a_row_before_wandb_has_it_and_is_written_once_a_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("recipes.logger.wandb.logger.time.monotonic", lambda: now[0])
    sent: list[tuple[int, int]] = []  # a row's step, and the step in the file at that time
    run = SimpleNamespace(log=lambda row: sent.append((row[STEP], json.loads((folder / ID_FILE).read_text())["step"])))
    logger = make_logger(folder)
    logger._open = lambda: None  # type: ignore[method-assign]
    logger._sent = SentRows(folder, None, resumed_at=None)
    logger._session = SimpleNamespace(put=lambda call: call(run))  # type: ignore[assignment]
    for step in range(1, 7):
        logger.log_metrics({"train/loss": 0.0}, step=step - 1)
        now[0] += 0.4
    assert sent == [(1, 1), (2, 4), (3, 4), (4, 4)]  # 5 waits for its second, 6 may still grow
    logger.finalize("success")
    assert sent[4:] == [(5, 6), (6, 6)]


def test_a_resume_after_a_rollback_sends_the_steps_that_come_again(folder: Path) -> None:
    rows = SentRows(folder, None, resumed_at=None)
    run = SimpleNamespace(log=lambda row: None)
    rows.send(run, [{STEP: step, "train/loss": 0.0} for step in (1, 2, 3)])
    rows.skip_nothing()
    rows.save(1)
    after = SentRows(folder, None, resumed_at=1)
    assert after.run_id == rows.run_id
    assert after.get_unsent({STEP: 1, "val/loss": 1.0}) == {}
    assert after.get_unsent({STEP: 2, "train/loss": 2.5}) == {STEP: 2, "train/loss": 2.5}


def test_rows_that_a_dead_wandb_process_did_not_accept_are_sent_by_the_resume(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,train/loss\n1,1\n2,2\n3,3\n")
    accepted: list[int] = []

    def log(row: dict[str, Any]) -> None:
        if row[STEP] == 2:
            raise ConnectionResetError
        accepted.append(row[STEP])

    rows = SentRows(folder, None, resumed_at=None)
    with pytest.raises(ConnectionResetError):
        rows.send(SimpleNamespace(log=log), [{STEP: step} for step in (1, 2, 3)])
    after = SentRows(folder, None, resumed_at=3)
    after.send_missed(SimpleNamespace(log=lambda row: accepted.append(row[STEP])))
    assert accepted == [1, 2, 3]


def test_an_id_file_without_a_step_is_taken_as_complete_up_to_the_resume(folder: Path) -> None:
    (folder / ID_FILE).write_text('{"id": "abcd1234"}')
    rows = SentRows(folder, None, resumed_at=2)
    assert rows.run_id == "abcd1234"
    assert rows.get_unsent({STEP: 2, "train/loss": 0.0}) == {}
    assert rows.get_unsent({STEP: 3, "train/loss": 0.0}) == {STEP: 3, "train/loss": 0.0}


def core_process() -> int:
    """Return the process id of W&B's own process, a child of this one."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if name == "wandb-core" and int(parent) == os.getpid() and state != "Z":
            return int(status.parent.name)
    raise AssertionError("it does not run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_wandb_process_that_dies_or_hangs_costs_one_log_line_and_never_the_run(
    folder: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("recipes.logger.wandb.logger._START_SECONDS", 10.0)
    logger = make_logger(folder, finish_timeout_seconds=-8.0)  # two seconds in all
    logger.log_event("start", 0)
    log_steps(logger, 1, 2)
    process = core_process()
    os.kill(process, number)
    began = time.monotonic()
    log_steps(logger, *range(3, 300))
    assert time.monotonic() - began < 3.0  # a queue entry each
    logger.finalize("success")
    logger.log_event("end", 299, status="finished")
    with contextlib.suppress(ProcessLookupError):
        # a stopped process would outlive this test
        os.kill(process, signal.SIGKILL)
    # two seconds to finish and five for its process to end; W&B alone would wait forever
    assert time.monotonic() - began < 20.0
    assert len(log_lines) == 2, log_lines
    assert log_lines[1].startswith("W&B is switched off from here on: ")
    logger.log_event("start", 0)  # does nothing
    log_steps(logger, 300)


def test_an_unreachable_server_is_waited_for_briefly_and_the_run_kept_offline(
    folder: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the port that discards: closed
    began = time.monotonic()
    logger = make_logger(folder, init_timeout_seconds=2)
    logger.log_event("start", 0)
    assert time.monotonic() - began < 20.0
    log_steps(logger, 1, 2)
    logger.finalize("success")
    logger.log_event("end", 2, status="finished")
    assert len(log_lines) == 1
    assert "wandb sync" in log_lines[0]
    [rows] = [rows for records in records_of(folder / "wandb") if (rows := find_rows(records))]
    assert [row[STEP] for row in rows] == [1, 2]


def test_an_online_resume_sends_the_rows_that_the_server_does_not_have(
    folder: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.base_url)
        before = make_logger(folder)
        before.log_event("start", 0)
        run_id = str(before.version)
        log_steps(before, 1, 2, 3, 4, 5)
        before.log_event("preempted", 5, signal="SIGTERM", saved=True)
        assert server.steps(run_id) == [(step - 1, step) for step in range(1, 6)]
        # as if a kill had lost the last two on their way
        del server.rows[run_id][3:]
        server.summary[run_id] = '{"trainer/global_step": 3}'
        lines = ["step,train/loss", *(f"{step},{step}" for step in range(1, 5))]
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
        after = make_logger(folder)
        after.resume_at(4)
        after.log_event("resume", 4)
        log_steps(after, 5, 6)
        after.log_event("end", 6, status="finished")
        assert server.steps(run_id) == [(step - 1, step) for step in range(1, 7)]
        assert server.exit_codes[run_id] == [75, 0]
        assert json.loads(server.summary[run_id])["status"] == "finished"
    url = f"W&B: {server.base_url}/us/lightning-recipes/runs/{run_id}"
    assert log_lines == [url, url]


def test_wandb_mode_disabled_leaves_nothing_behind(
    folder: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = make_logger(folder)
    logger.log_event("start", 0)
    log_steps(logger, 1, 2)
    logger.log_event("end", 2, status="finished")
    assert (log_lines, logger.version, (folder / "wandb").exists()) == ([], None, False)


def test_a_run_that_never_started_opens_no_wandb_run(folder: Path) -> None:
    logger = make_logger(folder)
    logger.log_hyperparams({})
    assert logger.experiment is None
    (folder / "config.yaml").unlink()
    logger.finalize("failed")
    logger.log_event("oom", 0, error="no memory for the model")
    logger.log_event("end", 0, status="out_of_memory", error="no memory for the model")
    assert not (folder / "wandb").exists()
    assert not (folder / ID_FILE).exists()


def test_the_id_in_a_checkpoint_of_another_folder_is_not_used(folder: Path, tmp_path: Path) -> None:
    saved = {"loggers": {"CsvLogger": "x", "WandbLogger": "abcd1234"}}
    ids = []
    for run in ("here", "elsewhere"):
        here = tmp_path / "here"
        here.mkdir(exist_ok=True)
        logger = make_logger(here)
        checkpoint = tmp_path / run / "checkpoints" / "step_0000002.ckpt"
        logger.on_load_checkpoint(SimpleNamespace(ckpt_path=str(checkpoint)), None, saved)
        ids.append(logger._saved_id)
    assert ids == ["abcd1234", None]


def test_alerts_of_a_kind_are_rate_limited_and_the_next_counts_those_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("recipes.logger.wandb.logger.time.monotonic", lambda: now[0])
    alerts = Alerts(every_minutes=30)
    sent = []
    for minute in range(65):
        now[0] = 60.0 * minute
        sent.append(alerts.get_due("spike", minute, {}))
    texts = {minute: alert["text"] for minute, alert in enumerate(sent) if alert is not None}
    assert texts == {
        0: "step 0",
        30: "step 30; 29 more since the last alert",
        60: "step 60; 29 more since the last alert",
    }
    assert alerts.get_due("checkpoint", 70, {}) is None
    error = {"status": "failed", "error": "OutOfMemoryError: 2 GiB"}
    oom = alerts.get_due("end", 70, error)
    assert oom is not None
    assert oom["title"] == "Out of memory"
    assert Alerts(every_minutes=None).get_due("spike", 1, {}) is None


def test_the_exit_code_in_wandb_is_that_of_the_process() -> None:
    def get_status(*events: str, event: str = "end", **fields: Any) -> tuple[str, int]:
        wandb_exit = WandbExit()
        for name in events:
            wandb_exit.note(name)
        summary = {"status": fields.get("status")} if event == "end" else {}
        return wandb_exit.get_status(event, fields, summary)

    assert get_status(status="finished") == ("finished", 0)
    assert get_status(status="failed") == ("failed", 1)
    assert get_status("checkpoint_rejected", "resume", status="finished") == ("finished", 0)
    assert get_status("resume", "checkpoint_rejected", status="finished") == ("diverged", 3)
    assert get_status("checkpoint_failed", status="finished") == ("unsaved", 74)
    assert get_status("checkpoint_failed", "checkpoint", status="finished") == ("finished", 0)
    assert get_status(status="diverged") == ("diverged", 3)
    assert get_status(status="out_of_memory") == ("out_of_memory", 71)
    assert get_status(status="interrupted") == ("interrupted", 130)
    assert get_status(event="preempted", saved=True, signal="SIGINT") == ("preempted", 75)
    assert get_status(event="preempted", saved=False, signal="SIGTERM") == ("preempted", 143)
    assert get_status(event="preempted", saved=False, signal="SIGINT") == ("preempted", 130)


def test_the_classes_of_the_last_validation_are_a_table(tmp_path: Path) -> None:
    record = {"class_names": ["cat"], "samples": [3, 0], "right": [2, 0], "pairs": [[0, 1, 1]]}
    (tmp_path / "classes_val.json").write_text(json.dumps(record))
    table = classes_table(tmp_path)
    assert table.columns == ["class", "predicted", "samples"]
    assert table.data == [["cat", "cat", 2], ["cat", "1", 1]]
    assert classes_table(tmp_path / "none") is None
