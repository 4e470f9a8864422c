"""Every way a fit can end: its exit code, its events and its last line, with a trainer that does nothing but end so."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.build import Run
from recipes.checkpoint.saver import CheckpointSaver
from recipes.logger.summary import SummaryWriter
from recipes.mode import fit as fit_module
from recipes.mode.fit import _last_line, fit
from recipes.mode.start import RunStartCallback
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.failure import is_peer_failure
from recipes.runtime.signals import Preempted

SUMMARY = {
    "status": "finished",
    "ended_by": "trainer.max_steps",
    "steps": 7,
    "train_loss": 1.5,
    "val_loss": 2.25,
    "tokens_per_second": 1234.5,
}
WHOLE = SimpleNamespace(is_valid=True)
STEP = 7


class EventLog:
    """A logger that keeps the events it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        self.events.append({"event": event, "step": step, **fields})


class FakeSaver(CheckpointSaver):
    """A saver whose last save ended as the test says."""

    def __init__(self, newest: Any) -> None:
        self.save_log = SimpleNamespace(newest=newest)  # type: ignore[assignment]


class FakeStrategy:
    """One rank: a broadcast returns its argument."""

    def __init__(self) -> None:
        self.num_barriers = 0

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        self.num_barriers += 1


class FakeTrainer:
    """Seven steps that take no time; then `end` is called, which returns or raises."""

    max_steps = 10
    global_rank = 0
    interrupted = False

    def __init__(self, folder: Path, end: Callable[[], None], newest: Any) -> None:
        self.writer = SummaryWriter(run_folder=folder)
        self.saver = FakeSaver(newest)
        self.log = EventLog()
        self.callbacks: list[Any] = [self.writer]
        self.checkpoint_callbacks = [self.saver]
        self.loggers = [SimpleNamespace(), self.log]  # the first takes no events
        self.strategy = FakeStrategy()
        self.global_step = 0
        self._end = end
        restores = {name: lambda: None for name in ("_restore_modules_and_callbacks", "restore_training_state")}
        self._checkpoint_connector = SimpleNamespace(**restores)

    def fit(self, task: Any, **arguments: Any) -> None:
        assert arguments["weights_only"] is True
        self.global_step = STEP
        self._end()


class Outcome(SimpleNamespace):
    """What is left of a fit.

    Attributes:
        exit_code: What it returned; None if it raised.
        events: What it logged.
        lines: What it printed.
        num_barriers: How often it waited for the other ranks after the end.
    """


@pytest.fixture
def run_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Outcome]:
    """Run `fit` in `tmp_path` with a trainer that ends as the test says."""
    caplog.set_level(logging.INFO, logger="lightning_recipes")

    def run(
        end: Callable[[], None] = lambda: None,
        *,
        summary: dict[str, Any] | None = None,
        newest: Any = WHOLE,
        checkpoint: Path | None = None,
        has_begun: bool = True,
        raises: type[BaseException] | None = None,
        interrupted: bool = False,
        rank: int = 0,
    ) -> Outcome:
        def start_and_end() -> None:
            [start] = [c for c in trainer.callbacks if isinstance(c, RunStartCallback)]
            start.has_begun = has_begun
            trainer.writer.newest = SUMMARY | (summary or {})
            end()

        trainer = FakeTrainer(tmp_path, start_and_end, newest)
        trainer.interrupted = interrupted
        trainer.global_rank = rank
        built: Any = Run(
            name="test",
            folder=tmp_path,
            task=SimpleNamespace(),  # type: ignore[arg-type]
            data=SimpleNamespace(  # type: ignore[arg-type]
                prepare_data=lambda: None, source=SimpleNamespace(describe=lambda: "no data"), eval_sources={}
            ),
            trainer=trainer,  # type: ignore[arg-type]
            precision=None,  # type: ignore[arg-type]
            accumulation=None,  # type: ignore[arg-type]
            checkpoint=checkpoint,
            tokenizer_folder=tmp_path,
            overrides=[],
            tags=[],
        )
        exit_code = None
        if raises is None:
            exit_code = fit(built)
        else:
            with pytest.raises(raises):
                fit(built)
        return Outcome(
            exit_code=exit_code,
            events=trainer.log.events,
            lines=caplog.messages,
            num_barriers=trainer.strategy.num_barriers,
        )

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


def in_own_code(error: str) -> str:
    """What is said of an error of `raising`, which is code of a user's own: its function, file and line."""
    line = raising.__code__.co_firstlineno + 2
    return f"{__name__}.raising.<locals>.end failed, {__file__} line {line}: {error}"


def end_event(status: str, **fields: Any) -> dict[str, Any]:
    return {"event": "end", "step": STEP, "status": status, **fields}


def test_a_finished_run_returns_0_and_its_last_line_names_losses_speed_and_folder(
    run_fit: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_fit()
    assert outcome.exit_code == 0
    assert outcome.events == [end_event("finished", by="trainer.max_steps")]
    losses = "train loss 1.5000, val loss 2.2500"
    assert outcome.lines[-1] == f"Finished: 7 steps, {losses}, 1,234 tokens/s, in {tmp_path}"


def test_the_last_line_names_the_report_if_there_is_one(run_fit: Callable[..., Outcome], tmp_path: Path) -> None:
    """Of this start: without the callback that writes it, a resumed run has that of the start before."""
    known, page = {"val_loss": None, "tokens_per_second": None}, tmp_path / "report.html"
    page.touch()
    os.utime(page, (time.time() - 60,) * 2)
    assert run_fit(summary=known).lines[-1] == f"Finished: 7 steps, train loss 1.5000, in {tmp_path}"
    outcome = run_fit(lambda: os.utime(page, (time.time() + 1,) * 2), summary=known)
    assert outcome.lines[-1] == f"Finished: 7 steps, train loss 1.5000, report {page}"


def test_the_last_line_omits_what_the_summary_does_not_know(run_fit: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run_fit(summary={"val_loss": None, "tokens_per_second": None})
    assert outcome.lines[-1] == f"Finished: 7 steps, train loss 1.5000, in {tmp_path}"


def test_the_last_line_of_a_run_without_tokens_has_its_samples(run_fit: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run_fit(summary={"val_loss": None, "tokens_per_second": None, "samples_per_second": 99.6})
    assert outcome.lines[-1] == f"Finished: 7 steps, train loss 1.5000, 100 samples/s, in {tmp_path}"


def test_a_last_loss_that_is_nan_returns_3(run_fit: Callable[..., Outcome]) -> None:
    outcome = run_fit(summary={"status": "diverged", "train_loss": None})
    assert outcome.exit_code == 3
    assert outcome.lines[-1].startswith("Diverged: the training loss is NaN or inf")


@pytest.mark.parametrize(
    ("rejected", "exit_code"),
    [(None, ExitCode.UNSAVED), ("a tensor is not finite", ExitCode.DIVERGED)],
)
def test_a_last_checkpoint_that_is_not_on_disk_is_no_success(
    run_fit: Callable[..., Outcome], rejected: str | None, exit_code: int
) -> None:
    newest = SimpleNamespace(is_valid=False, rejected=rejected, path=Path("step_0000007.ckpt"))
    outcome = run_fit(newest=newest)
    assert outcome.exit_code == exit_code
    assert outcome.lines[-1] == "The last checkpoint of this run, step_0000007.ckpt, was not written"


def test_a_run_that_never_saved_is_a_success(run_fit: Callable[..., Outcome]) -> None:
    assert run_fit(newest=None).exit_code == 0


def test_a_preempted_run_that_saved_returns_75_and_says_how_to_resume(
    run_fit: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_fit(raising(Preempted("SIGTERM", step=STEP, saved=True)))
    assert outcome.exit_code == 75
    assert outcome.events == [{"event": "preempted", "step": STEP, "signal": "SIGTERM", "saved": True}]
    command = f"python train.py resume={tmp_path}"
    assert outcome.lines[-1] == f"Stopped by SIGTERM at step 7, saved; to resume: {command}"
    assert outcome.num_barriers == 1


def test_a_preempted_run_that_could_not_save_returns_143_and_names_the_newest_checkpoint(
    run_fit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = raising(Preempted("SIGUSR1", step=STEP, saved=False))
    outcome = run_fit(preempted)
    assert outcome.exit_code == 143
    assert outcome.events[0]["saved"] is False
    assert outcome.lines[-1] == "Stopped by SIGUSR1 at step 7; nothing was saved"
    older = tmp_path / "checkpoints" / "step_0000005.ckpt"
    monkeypatch.setattr(fit_module, "newest_checkpoint", lambda folder: older)
    outcome = run_fit(preempted)
    assert outcome.exit_code == 143
    assert "not saved; the newest checkpoint is step_0000005.ckpt; to resume:" in outcome.lines[-1]


def test_a_run_preempted_before_its_first_step_has_nothing_to_save(run_fit: Callable[..., Outcome]) -> None:
    outcome = run_fit(raising(Preempted("SIGTERM", step=0, saved=False)))
    assert outcome.exit_code == 75
    assert outcome.lines[-1] == "Stopped by SIGTERM before the first step; to start again: the same command"


def test_an_error_with_an_exit_code_ends_the_run_with_it(
    run_fit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("5 rollbacks did not help")
    error.exit_code = 3  # type: ignore[attr-defined]
    outcome = run_fit(raising(error))
    assert outcome.exit_code == 3
    assert outcome.events == [end_event("diverged", error="5 rollbacks did not help")]
    assert outcome.lines[-1] == "5 rollbacks did not help; nothing was saved"
    assert outcome.num_barriers == 1
    good = tmp_path / "checkpoints" / "step_0000005.ckpt"
    monkeypatch.setattr(fit_module, "newest_checkpoint", lambda folder: good)
    outcome = run_fit(raising(error))
    assert outcome.lines[-1] == f"5 rollbacks did not help; the last good checkpoint is {good}"


def test_a_crash_is_raised_after_its_event(run_fit: Callable[..., Outcome]) -> None:
    outcome = run_fit(raising(ZeroDivisionError("a bug")), raises=ZeroDivisionError)
    assert outcome.events == [end_event("failed", error=in_own_code("ZeroDivisionError: a bug"))]


@pytest.mark.parametrize("rank", [0, 3])
def test_out_of_memory_logs_its_rank_and_leaves_a_report_for_the_launcher(
    run_fit: Callable[..., Outcome], tmp_path: Path, rank: int
) -> None:
    error = MemoryError("cannot allocate 7 GiB\nof a device with 6")
    outcome = run_fit(raising(error), raises=MemoryError, rank=rank)
    first_line = "cannot allocate 7 GiB"
    assert outcome.events == [
        {"event": "oom", "step": STEP, "rank": rank, "error": first_line},
        end_event("out_of_memory", error=first_line),
    ]
    report = json.loads((tmp_path / "oom" / f"rank_{rank:05d}.json").read_text())
    assert (report["rank"], report["step"], report["error"]) == (rank, STEP, first_line)


def test_a_full_disk_does_not_replace_the_out_of_memory_error(run_fit: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "oom").write_text("")  # a file where the folder should be
    outcome = run_fit(raising(MemoryError("full")), raises=MemoryError)
    assert [event["event"] for event in outcome.events] == ["oom", "end"]


def lost_connection() -> RuntimeError:
    error = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")
    assert is_peer_failure(error)
    return error


def test_a_lost_peer_is_blamed_on_the_rank_that_ran_out_of_memory(
    run_fit: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "oom").mkdir()
    report = {"rank": 1, "step": 6, "error": "CUDA out of memory"}
    (tmp_path / "oom" / "rank_00001.json").write_text(json.dumps(report))
    outcome = run_fit(raising(lost_connection()), raises=RuntimeError)
    assert outcome.events == [
        {"event": "oom", "step": 6, "rank": 1, "error": "CUDA out of memory"},
        {"event": "end", "step": 6, "status": "out_of_memory", "error": "CUDA out of memory"},
    ]


def test_a_lost_peer_that_left_no_report_is_named_as_the_cause(
    run_fit: Callable[..., Outcome],
) -> None:
    outcome = run_fit(raising(lost_connection()), raises=RuntimeError)
    [event] = outcome.events
    assert event["status"] == "failed"
    assert "another rank failed first" in event["error"]


@pytest.mark.parametrize(("interrupted", "raised"), [(True, KeyboardInterrupt), (False, SystemExit)])
def test_ctrl_c_is_told_apart_from_another_exit(
    run_fit: Callable[..., Outcome], interrupted: bool, raised: type[BaseException]
) -> None:
    outcome = run_fit(raising(SystemExit(1)), raises=raised, interrupted=interrupted)
    assert outcome.events == [end_event("interrupted")]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    manifest = SimpleNamespace(step=step, ended=None)
    monkeypatch.setattr(fit_module, "read_manifest", lambda checkpoint: manifest)


def test_a_resume_that_fails_before_its_first_step_logs_no_event(
    run_fit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 5)
    crash = raising(OSError("the shard is damaged"))
    arguments = {"checkpoint": tmp_path / "step_0000005.ckpt", "raises": OSError}
    assert run_fit(crash, has_begun=False, **arguments).events == []
    assert run_fit(crash, has_begun=True, **arguments).events == [
        end_event("failed", error=in_own_code("OSError: the shard is damaged"))
    ]


def test_a_checkpoint_at_the_last_step_leaves_nothing_to_do(
    run_fit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 10)
    checkpoint = tmp_path / "step_0000010.ckpt"
    reader = SimpleNamespace(find_valid=lambda named: named)
    monkeypatch.setattr(fit_module, "get_checkpoint_io", lambda run: reader)
    outcome = run_fit(raising(AssertionError("must not train")), checkpoint=checkpoint)
    assert outcome.exit_code == 0
    assert outcome.events == []
    assert outcome.lines == [f"Nothing to do: {checkpoint} is at step 10 of 10"]


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        ({"steps": 1, "train_loss": 2.0, "val_loss": None}, "Finished: 1 step, train loss 2.0000, in run"),
        ({"steps": "x", "train_loss": [], "tokens_per_second": {}}, "Finished: in run"),
        ({}, "Finished: in run"),
        ({"steps": 1, "train_loss": 0.0, "measures": {"train/loss": None}}, "Finished: 1 step, in run"),  # a policy's
    ],
)
def test_the_last_line_has_what_a_summary_has(summary: dict[str, Any], line: str) -> None:
    assert _last_line(summary, Path("run")) == line
