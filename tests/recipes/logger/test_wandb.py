"""Real W&B runs, offline, read back with W&B's own reader: every row once, and how each run ended."""

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
from recipes.entry.run import run_composed
from recipes.logger.wandb.alerts import Alerts, WandbExit
from recipes.logger.wandb.init import ID_FILE
from recipes.logger.wandb.logger import STEP, WandbLogger
from recipes.logger.wandb.resume import rows_in_file

Record = dict[str, Any]
OF_WANDB = ("_step", "_runtime", "_timestamp")


@pytest.fixture(autouse=True, scope="module")
def nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home without a key, and no word about W&B in the environment."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.delenv("NETRC", raising=False)
        patch.setenv("HOME", str(home))
        yield home


def records_of(wandb_folder: Path) -> list[list[Record]]:
    """The records of each process that has told this run, the oldest first."""
    found = []
    for path in sorted(wandb_folder.glob("*run-*/run-*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=wandb_folder)
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    return found


def find_rows(records: list[Record]) -> list[Record]:
    """The history rows, without the numbers that W&B adds."""
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{k: v for k, v in row.items() if k not in OF_WANDB} for row in rows]


def summary_of(records: list[Record]) -> Record:
    """The newest value of everything in the summary."""
    summary: Record = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    return summary


def worst_exit_code(records: list[Record]) -> int | None:
    """None: the process has told of no end."""
    exits = [record["exit"] for record in records if record["type"] == "exit"]
    return exits[-1].get("exit_code", 0) if exits else None


def one_of(records: list[Record], kind: str) -> Record:
    """The only record of a kind."""
    [record] = [record for record in records if record["type"] == kind]
    content: Record = record[kind]
    return content


def words_of(folder: Path) -> list[str]:
    """Eight steps in two micro-batches each, with W&B."""
    texts = write_texts(folder.parent / "texts")
    words = [*TINY, f"data.path={texts}", "trainer.accelerator=cpu", "logger=wandb"]
    words += ["trainer.max_steps=8", "warmup_steps=1", "save_every=2", "eval_every=4"]
    return [*words, f"hydra.run.dir={folder}", "micro_batch_size=4"]


def train_here(*words: str) -> int:
    """A run in this process; its exit code."""
    composed, mistakes = compose_and_check(words)
    assert composed is not None, [str(mistake) for mistake in mistakes]
    return run_composed(composed)


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A run whose standard input is closed."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def without_zeros(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """metrics.csv keeps nine digits."""
    return [{name: float(f"{value:.9g}") for name, value in row.items()} for row in rows]


def assert_same_rows(rows: list[Record], folder: Path) -> None:
    """Each row of metrics.csv is one row of W&B: the same columns and, in nine digits, the same values."""
    expected = [
        {STEP if name == "step" else name: value for name, value in row.items()}
        for row in read_metrics(folder)
    ]
    assert without_zeros(rows) == expected


def test_a_run_without_a_key_is_kept_whole_on_disk_one_row_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    words = ["top_k: 8", "top_p: null", "temperature: 1.0", "every_n_steps: 4", "num_tokens: 8"]
    text = f"_target_: callbacks.sample_text.SampleText, prompts: [abc], {', '.join(words)}"
    said = train(folder, *words_of(folder), "tags=[mine]", f"+callbacks.sample_text={{{text}}}")
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stderr == ""
    told = [line for line in said.stdout.splitlines() if "W&B" in line]
    assert told == [
        "W&B: there is no API key, so this run is kept offline;"
        f" to upload it: wandb sync {folder}/wandb/offline-run-*"
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
    ours = json.loads((folder / "summary.json").read_text())
    assert {name: summary[name] for name in ours} == ours
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
        {name: pytest.approx(row[name]) for name in columns}
        for row in read_metrics(folder)
        if "val/loss" in row
    ]
    assert (summary["status"], worst_exit_code(records)) == ("finished", 0)


def test_two_ranks_stopped_and_started_again_are_one_run_with_every_row_once(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    signals = "+callbacks.signals={_target_: signalled.SignalAt, folder: ranks,"
    words = [*words_of(folder), f"{signals} signals: [step_3_SIGTERM_0]}}", "resume=auto"]
    words += ["strategy=ddp", "trainer.devices=2", "micro_batch_size=2"]
    stopped, finished = train(folder, *words), train(folder, *words)
    assert (stopped.returncode, finished.returncode) == (75, 0), stopped.stdout + finished.stdout
    first, second = records_of(folder / "wandb")
    assert one_of(first, "run")["run_id"] == one_of(second, "run")["run_id"]
    assert one_of(second, "run")["resume"] is True
    assert (worst_exit_code(first), worst_exit_code(second)) == (75, 0)
    assert [record["type"] for record in first].count("preempting") == 1
    assert [summary_of(records)["status"] for records in (first, second)] == [
        "preempted",
        "finished",
    ]
    rows, made_up = find_rows(first), find_rows(second)
    if made_up[0][STEP] == rows[-1][STEP]:  # the validation that the signal did not wait for
        assert not set(made_up[0]) & set(rows[-1]) - {STEP}
        rows[-1] |= made_up.pop(0)
    assert_same_rows(rows + made_up, folder)


def test_a_crash_a_lost_id_and_a_kill_leave_one_run_with_every_step_once(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    crash = "+callbacks.crash={_target_: support.CrashAt, step: 3}"
    kill = "+callbacks.kill={_target_: signalled.SignalAt, folder: killed,"
    assert train_here(*words_of(folder), crash) == 1
    (folder / ID_FILE).unlink()
    words = [f"resume={folder}", "~callbacks.crash"]
    # 3.6 s, so that W&B has had its second to write the first of them down
    killed = train(folder, *words, f"{kill} signals: [batch_7_SIGKILL_0], pause: 0.3}}")
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert train_here(f"resume={folder}", "~callbacks.kill") == 0

    crashed, killed_at, last = records_of(folder / "wandb")
    [run_id] = {one_of(records, "run")["run_id"] for records in (crashed, killed_at, last)}
    assert run_id == json.loads((folder / ID_FILE).read_text())["id"]
    assert (worst_exit_code(crashed), summary_of(crashed)["status"]) == (1, "failed")
    assert (worst_exit_code(killed_at), summary_of(killed_at)["status"]) == (None, "running")
    assert (worst_exit_code(last), summary_of(last)["status"]) == (0, "finished")
    every = [find_rows(records) for records in (crashed, killed_at, last)]
    steps = [row[STEP] for rows in every for row in rows]  # those that the kill took come after it
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row[STEP] for row in every[0]] == [1, 2, 3]
    assert every[1]
    losses = [row["train/loss"] for rows in every for row in rows]
    assert without_zeros([{"": loss} for loss in losses]) == [
        {"": row["train/loss"]} for row in read_metrics(folder)
    ]
    # and uploaded as the line says, they are one run whose own count never goes back
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
    """A run folder as it is when training begins."""
    node = {"_target_": "somewhere.Something"}
    config = {"name": "run", "tags": [], "model": node, "strategy": node, "optimizer": {"lr": 0.1}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "environment.json").write_text(json.dumps({"overrides": []}))
    return tmp_path


def logger_in(folder: Path, **words: Any) -> WandbLogger:
    given: dict[str, Any] = {
        "project": None,
        "entity": None,
        "group": None,
        "alert_every_minutes": 30,
        "upload_checkpoint": False,
        "init_timeout_seconds": 15,
        "finish_timeout_seconds": 60,
    }
    return WandbLogger(run_folder=folder, **given | words)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
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


def test_undone_steps_stay_and_those_made_anew_follow_them_with_marks_and_one_alert_a_kind(
    folder: Path,
) -> None:
    logger = logger_in(folder)
    logger.log_event("start", 0)
    log_steps(logger, 1, 2, 3)
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
        {STEP: 3, "train/loss": 3, "event/spike": 1},
        {STEP: 2, "train/loss": 2.5, "event/rollback": 1},
        {STEP: 3, "train/loss": 3.5},
    ]
    counts = [r["history"]["item"]["_step"] for r in records if r["type"] == "history"]
    assert counts == [0, 1, 2, 3, 4]
    alerts = [record["alert"]["title"] for record in records if record["type"] == "alert"]
    assert alerts == ["Spike", "Rollback", "Diverged"]
    assert (summary_of(records)["status"], worst_exit_code(records)) == ("diverged", 3)

    told = rows_in_file(folder / "wandb", one_of(records, "run")["run_id"])
    assert told is not None
    assert {step: row["train/loss"] for step, row in told.items()} == {1: 1, 2: 2.5, 3: 3.5}


def test_a_run_that_began_without_wandb_brings_its_rows_along(folder: Path) -> None:
    lines = ["step,train/loss,val/loss", "1,1,", "2,2,2.5", "3,3,"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    logger = logger_in(folder)
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


def test_rows_told_before_are_told_again_only_where_they_differ(folder: Path) -> None:
    before = logger_in(folder)
    before.log_event("start", 0)
    log_steps(before, 1, 2, 3, 4)
    before.finalize("failed")
    before.log_event("end", 4, status="failed", error="gone")
    saved = folder / "checkpoints" / "step_0000004.ckpt"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "last").symlink_to(saved.name)
    after = logger_in(folder, upload_checkpoint=True)
    after.resume_at(1)
    after.log_event("resume", 1)
    log_steps(after, 2)
    after.log_metrics({"val/loss": 7.0}, step=1)  # the crash came before the validation
    log_steps(after, 3, 4, loss=0.5)
    after.finalize("success")
    after.log_event("end", 4, status="finished")
    _, records = records_of(folder / "wandb")
    assert find_rows(records) == [
        {STEP: 2, "val/loss": 7},
        {STEP: 3, "train/loss": 3.5},
        {STEP: 4, "train/loss": 4.5},
    ]
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    assert [one["name"] for one in artifacts] == [f"checkpoint-{one_of(records, 'run')['run_id']}"]


def core_process() -> int:
    """W&B's own process: a child of this one."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if name == "wandb-core" and int(parent) == os.getpid() and state != "Z":
            return int(status.parent.name)
    raise AssertionError("it does not run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_of_wandb_that_dies_or_hangs_costs_one_line_and_never_the_run(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("recipes.logger.wandb.logger._START_SECONDS", 10.0)
    logger = logger_in(folder, finish_timeout_seconds=-8.0)  # two seconds in all
    logger.log_event("start", 0)
    log_steps(logger, 1, 2)
    os.kill(core_process(), number)
    began = time.monotonic()
    log_steps(logger, *range(3, 300))
    assert time.monotonic() - began < 3.0  # a queue entry each
    logger.finalize("success")
    logger.log_event("end", 299, status="finished")
    # two seconds of patience and five for its process to end; W&B alone would wait for ever
    assert time.monotonic() - began < 20.0
    assert len(said) == 2, said
    assert said[1].startswith("W&B is left out from here on: ")
    logger.log_event("start", 0)  # and nothing comes of it
    log_steps(logger, 300)


def test_a_server_out_of_reach_is_waited_for_a_moment_and_the_run_kept_offline(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the port that discards: closed
    began = time.monotonic()
    logger = logger_in(folder, init_timeout_seconds=2)
    logger.log_event("start", 0)
    assert time.monotonic() - began < 20.0
    log_steps(logger, 1, 2)
    logger.finalize("success")
    logger.log_event("end", 2, status="finished")
    assert len(said) == 1
    assert "wandb sync" in said[0]
    [told] = [rows for records in records_of(folder / "wandb") if (rows := find_rows(records))]
    assert [row[STEP] for row in told] == [1, 2]


def test_online_a_resume_tells_the_server_what_it_has_not(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.base_url)
        before = logger_in(folder)
        before.log_event("start", 0)
        run_id = str(before.version)
        log_steps(before, 1, 2, 3, 4, 5)
        before.log_event("preempted", 5, signal="SIGTERM", saved=True)
        assert server.steps(run_id) == [(step - 1, step) for step in range(1, 6)]
        # a kill would have taken the last two on their way
        del server.rows[run_id][3:]
        server.summary[run_id] = '{"trainer/global_step": 3}'
        lines = ["step,train/loss", *(f"{step},{step}" for step in range(1, 5))]
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
        after = logger_in(folder)
        after.resume_at(4)
        after.log_event("resume", 4)
        log_steps(after, 5, 6)
        after.log_event("end", 6, status="finished")
        assert server.steps(run_id) == [(step - 1, step) for step in range(1, 7)]
        assert server.exit_codes[run_id] == [75, 0]
        assert json.loads(server.summary[run_id])["status"] == "finished"
    url = f"W&B: {server.base_url}/us/lightning-recipes/runs/{run_id}"
    assert said == [url, url]


def test_a_disabled_wandb_leaves_nothing(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = logger_in(folder)
    logger.log_event("start", 0)
    log_steps(logger, 1, 2)
    logger.log_event("end", 2, status="finished")
    assert (said, logger.version, (folder / "wandb").exists()) == ([], None, False)


def test_a_run_that_never_began_opens_nothing(folder: Path) -> None:
    logger = logger_in(folder)
    logger.log_hyperparams({})
    assert logger.experiment is None
    (folder / "config.yaml").unlink()
    logger.finalize("failed")
    logger.log_event("oom", 0, error="no memory for the model")
    logger.log_event("end", 0, status="out_of_memory", error="no memory for the model")
    assert not (folder / "wandb").exists()
    assert not (folder / ID_FILE).exists()


def test_a_checkpoint_of_another_folder_does_not_lend_its_id(folder: Path, tmp_path: Path) -> None:
    saved = {"loggers": {"CsvLogger": "x", "WandbLogger": "abcd1234"}}
    ids = []
    for run in ("here", "elsewhere"):
        here = tmp_path / "here"
        here.mkdir(exist_ok=True)
        logger = logger_in(here)
        checkpoint = tmp_path / run / "checkpoints" / "step_0000002.ckpt"
        logger.on_load_checkpoint(SimpleNamespace(ckpt_path=str(checkpoint)), None, saved)
        ids.append(logger._saved_id)
    assert ids == ["abcd1234", None]


def test_alerts_of_a_kind_wait_and_the_next_says_how_many_were_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("recipes.logger.wandb.alerts.time.monotonic", lambda: now[0])
    alerts = Alerts(every_minutes=30)
    sent = []
    for minute in range(65):
        now[0] = 60.0 * minute
        sent.append(alerts.due("spike", minute, {}))
    texts = {minute: alert["text"] for minute, alert in enumerate(sent) if alert is not None}
    assert texts == {
        0: "step 0",
        30: "step 30; 29 more since the last alert",
        60: "step 60; 29 more since the last alert",
    }
    assert alerts.due("checkpoint", 70, {}) is None
    error = {"status": "failed", "error": "OutOfMemoryError: 2 GiB"}
    oom = alerts.due("end", 70, error)
    assert oom is not None
    assert oom["title"] == "Out of memory"
    assert Alerts(every_minutes=None).due("spike", 1, {}) is None


def test_the_exit_code_is_the_one_of_the_process() -> None:
    def of(*noted: str, event: str = "end", **fields: Any) -> tuple[str, int]:
        ending = WandbExit()
        for one in noted:
            ending.note(one)
        summary = {"train_loss": fields.pop("train_loss", 1.0)}
        return ending.of(event, fields, summary)

    assert of(status="finished") == ("finished", 0)
    assert of("checkpoint_rejected", "resume", status="finished") == ("finished", 0)
    assert of("checkpoint_failed", status="finished") == ("unsaved", 74)
    assert of("checkpoint_failed", "checkpoint", status="finished") == ("finished", 0)
    assert of(status="finished", train_loss=None) == ("diverged", 3)
    assert of(status="out_of_memory") == ("out_of_memory", 71)
    assert of(status="interrupted") == ("interrupted", 130)
    assert of(event="preempted", saved=True) == ("preempted", 75)
    assert of(event="preempted", saved=False) == ("preempted", 143)
