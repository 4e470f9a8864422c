"""StepProfiler traces exactly the requested steps, and none of them counts in the throughput."""

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from timed import FETCH, monitor_at, timed

from callbacks.step_profiler import StepProfiler


def test_two_steps_of_two_micro_batches_are_traced_and_excluded_from_the_throughput(
    plain_module, make_trainer, read_column, clock, tmp_path
) -> None:
    module = timed(plain_module, clock)
    callbacks = [monitor_at(clock), StepProfiler(steps=2, after=1)]
    make_trainer(callbacks=callbacks, accumulate_grad_batches=2).fit(module)
    folder = tmp_path / "run/profile"
    operators = json.loads((folder / "operators.json").read_text())
    calls = {operator["name"]: operator["calls"] for operator in operators}
    assert calls["aten::addmm"] == 2 * 2  # one linear layer, two steps of two micro-batches
    shares = [operator["share"] for operator in operators]
    assert shares == sorted(shares, reverse=True)
    assert 0.3 < sum(shares) <= 1 + 1e-9
    compressed = (folder / "rank_00000.trace.json.gz").read_bytes()
    trace = json.loads(gzip.decompress(compressed))
    assert sum(e.get("name") == "aten::addmm" for e in trace["traceEvents"]) == 4
    # steps 2 and 3 of four are in no row; the last one is as fast as usual
    assert read_column("time/step_seconds") == [2.0]
    assert read_column("throughput/tokens_per_second") == [16.0]
    # three steps of 2 s, less the fetch before the first that is traced
    assert sum(read_column("time/excluded_seconds")) == 3 * 2.0 - FETCH


def test_ranks_that_write_their_traces_at_the_same_time_write_all_of_them(tmp_path) -> None:
    all_write = threading.Barrier(3)

    class Trace:
        def export_chrome_trace(self, path: str) -> None:
            all_write.wait(timeout=30)
            Path(path).write_text(path)
            all_write.wait(timeout=30)

    def write(rank: int) -> None:
        trainer = SimpleNamespace(global_rank=rank, is_global_zero=False, loggers=[], default_root_dir=tmp_path)
        StepProfiler(steps=1)._write(trainer, Trace())

    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(write, range(3)))
    names = [f"rank_{rank:05d}.trace.json.gz" for rank in range(3)]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names


def test_a_run_that_fails_while_it_is_traced_still_writes_the_trace(plain_module, make_trainer, tmp_path) -> None:
    class Failing(plain_module):  # type: ignore[misc]
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(callbacks=[StepProfiler(steps=5, after=1)])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Failing())
    assert json.loads((tmp_path / "run/profile/operators.json").read_text())


def test_tracing_writes_nothing_of_its_own_to_the_terminal_of_a_recipe(tmp_path) -> None:
    from support import TINY, run_train, write_texts  # with the recipes, without which the other tests run

    overrides = ["trainer.max_steps=3", "profile_steps=1", "callbacks.step_profiler.after=1"]
    done = run_train(
        [*TINY, *overrides, f"data.path={write_texts(tmp_path / 'texts')}", "hydra.run.dir=run"],
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "profiler_start" not in done.stdout + done.stderr
    assert "profile: 1 step in run/profile" in done.stdout + done.stderr


def test_a_run_that_is_too_short_logs_a_warning(plain_module, make_trainer, tmp_path, caplog) -> None:
    make_trainer(callbacks=[StepProfiler(steps=5, after=20)]).fit(plain_module())
    assert "the run ended before step 21" in caplog.text
    assert not (tmp_path / "run/profile").exists()


def test_lightnings_own_profiler_keeps_working(plain_module, make_trainer, tmp_path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="times")
    make_trainer(callbacks=[StepProfiler(steps=1, after=1)], profiler=profiler).fit(plain_module())
    assert "run_training_batch" in (tmp_path / "fit-times.txt").read_text()


def test_tracing_zero_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        StepProfiler(steps=0)


@pytest.mark.parametrize("whose", ["Lightning's", "one's own"])
def test_nothing_is_traced_while_another_profiler_traces(
    plain_module, make_trainer, tmp_path, caplog, whose: str
) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="trace") if whose == "Lightning's" else None
    with nullcontext() if profiler else torch.profiler.profile():
        make_trainer(callbacks=[StepProfiler(steps=1, after=1)], profiler=profiler).fit(plain_module())
    assert "another torch profiler traces already" in caplog.text
    assert not (tmp_path / "run/profile").exists()


def test_without_a_logger_the_trace_is_in_the_trainers_own_folder(plain_module, make_trainer, tmp_path) -> None:
    make_trainer(callbacks=[StepProfiler(steps=1, after=1)], logger=False).fit(plain_module())
    assert (tmp_path / "profile/operators.json").exists()
