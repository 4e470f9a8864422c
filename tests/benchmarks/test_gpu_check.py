"""The checks of `make gpu-check` once, on a CPU with tiny models, each in its subprocess, as on a GPU."""

import json
import os
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_checks.plan import CHECKS

# what tests/parity, tests/kill and tests/recipes/test_loss_spike.py prove on a CPU, too
LONG = ["parity", "low precision", "resume after a kill", "resume of engines", "rollback", "two ranks"]
CHECKED = [check.name for check in CHECKS if check.name not in LONG or "LONG_TESTS" in os.environ]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the checks and one throughput measurement; return the exit codes and the result file."""
    folder = tmp_path_factory.mktemp("results")
    where = ["--tiny", "--accelerator", "cpu", "--results", str(folder)]
    only = [word for name in CHECKED for word in ("--only", name)] if len(CHECKED) < len(CHECKS) else []
    codes = [gpu_check.main([*where, *only]), gpu_check.main([*where, "--throughput", "--only", "gpt2, fsdp"])]
    [file] = folder.iterdir()
    assert file.name.startswith("cpu_"), "the docs show results of GPUs only"
    return json.loads(file.read_text()) | {"codes": codes, "text": file.read_text()}


def _figures(checked: dict[str, Any], name: str) -> dict[str, Any]:
    row = checked["checks"]["rows"][name]
    assert row["verdict"] == "pass", row["note"]
    figures: dict[str, Any] = row["figures"]
    return figures


def test_every_check_passes_on_a_cpu_but_those_of_what_only_a_gpu_does(checked: dict[str, Any]) -> None:
    rows = checked["checks"]["rows"]
    verdicts = {name: (row["verdict"], row["note"]) for name, row in rows.items()}
    reason = "the host never waits for a CPU: CUDA alone reports synchronizations"
    assert verdicts.pop("skip without a sync") == ("skipped", reason)
    reason = "FlexAttention needs a GPU: a CPU takes the dense mask"
    assert verdicts.pop("packed documents") == ("skipped", reason)
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == dict.fromkeys(verdicts, "pass"), verdicts
    assert list(rows) == CHECKED
    assert checked["codes"] == [0, 0]


def test_the_file_holds_versions_command_and_date_and_no_path_of_this_machine(checked: dict[str, Any]) -> None:
    machine = checked["checks"]["machine"]
    assert machine["torch"].startswith("2.")
    assert machine["gpus"] == []
    assert checked["device"] == machine["cpu"]
    assert checked["checks"]["command"].startswith("python benchmarks/gpu_check.py --tiny --accelerator cpu")
    assert len(checked["checks"]["date"]) == len("2026-01-01")
    assert str(Path(__file__).parents[2]) not in checked["text"].replace(checked["checks"]["command"], "")


@pytest.mark.slow
def test_engines_equal_one_device(checked: dict[str, Any]) -> None:
    differences = _figures(checked, "parity")
    assert set(differences) == {"fsdp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2, offload", "ZeRO-3"}
    assert 0 < max(value for found in differences.values() for value in found.values()) <= 1e-5
    low = _figures(checked, "low precision")
    # bfloat16 and float16 are on: they differ from float32 by more than another order of its sums
    assert 1e-6 < low["bf16-mixed, single, from float32"]["train/loss"] < 1e-3
    assert 1e-6 < low["16-mixed, single, from float32"]["train/loss"] < 1e-3


@pytest.mark.slow
def test_two_ranks_equal_one_and_end_when_one_of_them_fails(checked: dict[str, Any]) -> None:
    figures = _figures(checked, "two ranks")
    assert set(figures["differences"]) == {"ddp", "fsdp", "ZeRO-2"}
    assert set(figures["resumed"].values()) == {"same bits"}
    assert figures["seconds until torchrun ended after a failure"] > 0


@pytest.mark.slow
def test_a_killed_run_and_every_engine_resume_with_the_same_bits(checked: dict[str, Any]) -> None:
    figures = _figures(checked, "resume after a kill")
    assert figures["rows_before_kill"] == 6
    assert len(figures["losses"]) == 8
    assert len(figures["hashes"]["rank_00000.safetensors"]) == 32
    assert set(_figures(checked, "resume of engines").values()) == {"same bits"}


@pytest.mark.slow
def test_an_outlier_is_rolled_back(checked: dict[str, Any]) -> None:
    for name, found in _figures(checked, "rollback").items():
        assert found["skips"] == [11], name
        [[from_step, to_step]] = found["rollbacks"]
        assert (from_step, to_step) == (11, 4), name  # the snapshot of step 8 is too new


def test_a_full_memory_ends_with_71(checked: dict[str, Any]) -> None:
    assert _figures(checked, "out of memory")["exit_code"] == 71


def test_speeds_and_stalls_are_measured(checked: dict[str, Any]) -> None:
    speed = _figures(checked, "mfu")
    assert speed["flops_per_token"] == 180480.0
    assert abs(speed["flops_per_token_of_the_recipe"] / 180480.0 - 1) < 1e-6
    assert speed["mfu"] is None
    assert speed["step_seconds"] > 0
    assert speed["step_seconds_by_hand"] > 0
    saves = _figures(checked, "asynchronous save")
    assert {name: found["num_saves"] for name, found in saves.items()} == {"asynchronous": 3, "synchronous": 3}
    row = checked["throughput"]["rows"]["gpt2, fsdp"]
    assert row["verdict"] == "pass", row["note"]
    assert row["figures"]["tokens_per_second"] > 0


def test_without_a_gpu_it_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "num_gpus", lambda: 0)
    assert gpu_check.main([]) == 2
    printed = capsys.readouterr().err
    assert printed == "--accelerator gpu: torch sees no GPU on this machine; type --tiny --accelerator cpu\n"
    assert gpu_check.main(["--tiny", "--accelerator", "cpu", "--only", "speed"]) == 2
    assert "--only speed: there is no such check; type one of environment, mfu" in capsys.readouterr().err


def test_a_failed_check_is_recorded_and_makes_the_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import json, sys
name, folder = sys.argv[1:]
if name == "parity":
    raise SystemExit("the norm is NaN")
figures = {"gpus": [], "cpu": "Test CPU"} if name == "machine" else {}
outcome = {"verdict": "pass", "headline": "fine", "note": "", "figures": figures, "seconds": 0.0}
open(folder + "/outcome.json", "w").write(json.dumps(outcome))
"""
    monkeypatch.setattr(
        gpu_check,
        "_get_command",
        lambda check, settings: [gpu_check.sys.executable, "-c", script, check.name, str(settings.folder)],
    )
    where = ["--tiny", "--accelerator", "cpu", "--results", str(tmp_path)]
    assert gpu_check.main([*where, "--only", "parity", "--only", "rollback"]) == 1
    rows = json.loads((tmp_path / "cpu_test_cpu.json").read_text())["checks"]["rows"]
    assert (rows["parity"]["verdict"], rows["rollback"]["verdict"]) == ("fail", "pass")
    assert rows["parity"]["note"] == "exit code 1; its last lines: the norm is NaN"
    assert "1 of 2 failed: parity" in capsys.readouterr().out
