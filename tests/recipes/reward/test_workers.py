"""Rewards in processes of their own: a function that hangs, raises or dies costs its completions, not the run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from started import living, marked

from recipes.errors import ConfigError
from recipes.reward import Reward, Rewards
from recipes.reward.exact_match import ExactMatch
from recipes.reward.format import Format
from recipes.reward.length import Length
from recipes.reward.mine import OwnFunction
from recipes.reward.numeric import Numeric
from recipes.reward.regex import Regex
from recipes.reward.workers import RewardsInProcesses, RewardWorkers, Scores

CODE = """
import ctypes, os, re, signal, subprocess, sys, time

def misbehave(prompts, completions, references, rows):
    for completion in completions:
        if completion == "hangs":
            time.sleep(600)
        if completion == "backtracks":
            re.search("(a+)+b", "a" * 40)
        if completion == "needs time" and len(completions) > 1:
            time.sleep(600)
        if completion == "raises":
            raise ValueError("not this one")
        if completion == "exits":
            os._exit(3)
        if completion == "crashes":
            ctypes.string_at(0)
        if completion == "forks":
            for _ in range(20):
                process = os.fork() or time.sleep(600)
                os.kill(process, signal.SIGTERM)
                assert os.waitpid(process, 0)[1] == signal.SIGTERM
        if completion == "prints":
            print("printed by the function")
        if completion == "starts":
            subprocess.Popen(["sleep", "600"])
            re.search("(a+)+b", "a" * 40)
    return [float(len(completion)) for completion in completions]

def start_of_a_nap(prompts, completions, references, rows):
    start = time.monotonic()
    time.sleep(0.3)
    return [start] * len(completions)

def get_process(prompts, completions, references, rows):
    return [os.getpid(), os.getpgrp(), "torch" in sys.modules, len(os.environ["CUDA_VISIBLE_DEVICES"])]

def write_process_and_nap(prompts, completions, references, rows):
    with open(rows[0]["file"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(0.3)
    return [1.0]

def count(prompts, completions, references, rows):
    return {"one_less": [1.0], "text": ["1"] * 2, "nan": [1.0, float("nan")], "none": None}[completions[0]]
"""
RANK = """
import sys
from recipes.reward.mine import OwnFunction
from recipes.reward.workers import RewardWorkers
workers = RewardWorkers(
    functions={"mine": OwnFunction(path=sys.argv[1], weight=1.0)}, timeout_seconds=60.0, error_score=0.0, max_errors=5
)
workers(prompts=[""], completions=["starts"], references=[""], rows=[{}])
"""
Start = Callable[..., RewardWorkers]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return workers for functions of the file above, by name, with a time limit of half a second."""
    started: list[RewardWorkers] = []
    (tmp_path / "mine.py").write_text(CODE)

    def start(*names: str, **given: Any) -> RewardWorkers:
        functions = {name: OwnFunction(path=f"{tmp_path}/mine.py:{name}", weight=1.0) for name in names}
        given = {"functions": functions, "timeout_seconds": 0.5, "error_score": -1.0, "max_errors": 3} | given
        started.append(RewardWorkers(**given))
        return started[-1]

    yield start
    for workers in started:
        workers.close()


def call(workers: RewardWorkers, *completions: str, **row: str) -> Scores:
    empty = [""] * len(completions)
    return workers(prompts=empty, completions=completions, references=empty, rows=[row] * len(completions))


def test_a_function_that_uses_a_gpu_sees_that_of_the_rank_and_others_see_none(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.reward.workers._find_gpu", lambda: "GPU-1")
    with_gpu: Any = OwnFunction(path=f"{tmp_path}/mine.py:get_process", weight=1.0)
    with_gpu.uses_gpu = True
    without = OwnFunction(path=f"{tmp_path}/mine.py:get_process", weight=1.0)
    scores = call(start(functions={"with": with_gpu, "without": without}), "a", "b", "c", "d").of_functions
    assert (scores["with"][3], scores["without"][3]) == (len("GPU-1"), 0)


def test_each_function_scores_as_in_the_process_of_the_rank() -> None:
    functions: dict[str, Reward | None] = {
        "exact_match": ExactMatch(weight=2.0, answer_regex="#### (.*)", ignore_case=True),
        "format": Format(weight=0.25, tags=["think", "answer"]),
        "length": Length(weight=-0.5, target=1, limit=9, unit="words"),
        "numeric": Numeric(weight=0.1, answer_regex=None, relative_tolerance=1e-6),
        "off": None,
        "regex": Regex(weight=-1.0, pattern="a.c"),
    }
    completions = [
        "#### YES",
        "<think>a\nc</think><answer>1,200</answer>",
        "one two 3",
        "more than a pipe holds " * 9999,
    ]
    given = {"prompts": [""] * 4, "completions": completions, "references": ["#### yes", "1.2e3", "3", ""]}
    rewards = RewardsInProcesses(functions=functions, timeout_seconds=10.0, error_score=0.0, max_errors=1)
    scores = rewards(**given, rows=[{}] * 4)  # type: ignore[arg-type]
    expected = Rewards(functions=functions)(**given, rows=[{}] * 4)  # type: ignore[arg-type]
    assert scores == expected
    assert len({*scores["reward"]}) == 4
    nothing = RewardsInProcesses(functions={"off": None}, timeout_seconds=10.0, error_score=0.0, max_errors=1)
    assert nothing(**given, rows=[{}] * 4) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("completion", "what"),
    [
        ("backtracks", "it takes longer than 0.5 s in mine.py, line 9"),
        ("raises", "ValueError: not this one in mine.py, line 13"),
        ("exits", "its process ended by exit code 3"),
        ("crashes", "its process ended by signal 11, Segmentation fault in mine.py, line 17"),
    ],
)
def test_a_completion_that_breaks_a_function_costs_the_others_nothing(
    completion: str, what: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    workers = start("misbehave")
    assert call(workers, "a", completion, "ccc") == Scores(
        total=[1.0, -1.0, 3.0], of_functions={"misbehave": [1.0, -1.0, 3.0]}, num_errors={"misbehave": 1}
    )
    assert call(workers, "a", "ccc").num_errors == {"misbehave": 0}
    assert caplog.messages == [
        f"reward.misbehave: {what}; called for each completion alone, 1 of 3 get the error score -1; not logged again"
    ]


def test_a_batch_that_hangs_takes_three_time_limits(start: Start) -> None:
    workers = start("misbehave")
    call(workers, "a")
    begin = time.monotonic()
    assert call(workers, *["hangs"] * 64).num_errors == {"misbehave": 64}
    assert 1.4 < time.monotonic() - begin < 10.0, "0.5 s, and once more 0.5 + 0.25 + 0.125 + …; 64 times 0.5 s are 32"


def test_a_function_that_is_too_slow_for_all_at_once_scores_them_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assert call(start("misbehave"), "needs time", "a") == Scores(
        [10.0, 1.0], {"misbehave": [10.0, 1.0]}, {"misbehave": 0}
    )
    assert caplog.messages == [
        "reward.misbehave: it takes longer than 0.5 s in mine.py, line 11; called for each completion alone, 0 of 2 "
        "get the error score -1; not logged again"
    ]


def test_functions_are_called_at_the_same_time(start: Start, tmp_path: Path) -> None:
    nap = OwnFunction(path=f"{tmp_path}/mine.py:start_of_a_nap", weight=1.0)
    scores = call(start(functions={"one": nap, "other": nap}), "a").of_functions
    assert abs(scores["one"][0] - scores["other"][0]) < 0.25


def test_what_a_function_prints_goes_to_the_standard_error(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert call(start("misbehave"), "prints").total == [6.0]
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "printed by the function\n")


def test_a_worker_has_a_group_of_its_own_and_neither_torch_nor_a_gpu(start: Start) -> None:
    workers = start("get_process")
    process, group, has_torch, num_devices = call(workers, *"abcd").total
    assert process == group != os.getpgrp()
    assert (has_torch, num_devices) == (0.0, 0.0)
    assert call(workers, *"abcd").total[0] == process
    workers.close()
    workers.close()
    assert not Path(f"/proc/{process:.0f}").exists()
    assert call(workers, *"abcd").total[0] != process


def test_a_slow_import_is_not_part_of_the_call(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(0.7)\n{CODE}")
    slow = OwnFunction(path=f"{tmp_path}/slow.py:misbehave", weight=1.0)
    assert call(start(functions={"slow": slow}), "a").total == [1.0]


def test_a_class_of_the_users_is_found_as_in_the_rank(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_rewards.py").write_text(
        "class Own:\n    weight = 3.0\n    def __call__(self, *, completions, **given):\n        return [self.value]\n"
        "    def load(self):\n        self.value = 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own: Any = __import__("their_rewards").Own()
    functions = {"own": own, "mine": OwnFunction(path="mine.py:misbehave", weight=1.0)}
    assert call(start(functions=functions), "abc").total == [9.0]
    own.lock = threading.Lock()
    with pytest.raises(ConfigError, match="reward.own: it cannot be sent to the process that it runs in: TypeError"):
        start(functions={"own": own})


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("one_less", "it returned 1 scores for 2 completions"),
        ("text", "it returned '1' for a completion"),
        ("nan", "it returned nan for a completion"),
        ("none", "it returned NoneType for 2 completions"),
    ],
)
def test_a_reward_is_one_finite_number_for_each_completion(completion: str, message: str, start: Start) -> None:
    with pytest.raises(ConfigError, match=f"reward.count: {message}; type a list"):
        call(start("count"), completion, "")


def test_a_function_that_works_for_nothing_stops_the_run(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as first:
        call(start("misbehave"), "raises", "raises")
    assert str(first.value) == (
        "reward.misbehave: it works for no completion: ValueError: not this one in mine.py, line 13;"
        " type the same command once it is corrected"
    )
    workers = start("misbehave")
    completions = ["a", "raises", "exits", "a", "raises", "raises"]
    assert [call(workers, completion).total for completion in completions] == [[1], [-1], [-1], [1], [-1], [-1]]
    with pytest.raises(ConfigError) as later:
        call(workers, "hangs")
    assert str(later.value) == (
        "reward.misbehave: in 3 calls in a row it worked for no completion: it takes longer than 0.5 s in mine.py, "
        "line 7; type task.rewards.timeout_seconds=1, or the same command once it is corrected"
    )


def test_a_function_that_cannot_be_loaded_is_a_mistake_before_its_first_call(start: Start, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("import os\nos._exit(7)")
    for file, message in (
        ("broken", "broken.py:f: the file raises ZeroDivisionError: division by zero"),
        ("exits", "it cannot be loaded: its process ended by exit code 7"),
        ("none", "there is no such Python file"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(start(functions={"mine": OwnFunction(path=f"{tmp_path}/{file}.py:f", weight=1.0)}), "a")


def test_a_file_that_breaks_later_costs_scores_and_not_the_run(start: Start, tmp_path: Path) -> None:
    workers = start("misbehave")
    call(workers, "a")
    (tmp_path / "mine.py").write_text("1 / 0")
    assert call(workers, "a", "exits").num_errors == {"misbehave": 2}
    (tmp_path / "mine.py").write_text(CODE)
    assert call(workers, "a", "exits").num_errors == {"misbehave": 1}


def test_signals_of_a_job_do_not_cost_the_scores_of_its_last_step(start: Start, tmp_path: Path) -> None:
    workers, file = start("write_process_and_nap", timeout_seconds=5.0), tmp_path / "process"

    def send() -> None:
        _wait_for(file.exists)
        _wait_for(lambda: file.read_text() != "")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(int(file.read_text()), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert call(workers, "a", file=str(file)).total == [1.0]
    sender.join()


def test_a_function_may_end_processes_that_it_forks(start: Start) -> None:
    assert call(start("misbehave", timeout_seconds=5.0), "forks").total == [5.0]


def test_nothing_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    mark = f"{tmp_path}/{time.time_ns()}"
    command = [sys.executable, "-c", RANK, f"{tmp_path}/mine.py:misbehave"]
    path = os.pathsep.join(filter(None, sys.path))
    rank = subprocess.Popen(command, env=os.environ | marked(mark) | {"PYTHONPATH": path})
    _wait_for(lambda: len(living(mark)) == 3)  # with the worker, and what its function has started
    rank.kill()
    rank.wait()
    _wait_for(lambda: not living(mark), seconds=1.0)


def _wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.01)
