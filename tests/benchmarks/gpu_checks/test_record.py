"""The result file and the tables: only what was measured, and the README shows exactly that."""

import json
from pathlib import Path

import pytest
from gpu_checks import record
from gpu_checks.check import Outcome
from gpu_checks.plan import CHECKS
from gpu_checks.record import describe_rows, get_result_file, make_tables, write_docs, write_section


def _write(folder: Path, *, device: str, num_gpus: int, accelerator: str = "gpu") -> Path:
    path = get_result_file(folder, accelerator=accelerator, device=device, num_gpus=num_gpus)
    outcomes = [
        (CHECKS[0], Outcome(verdict="pass", headline="torch 2.13", note="cudnn attention: no")),
        (CHECKS[1], Outcome(verdict="fail", headline="155 ms", note="half as fast")),
        (CHECKS[-1], Outcome(verdict="skipped", note="needs two GPUs; this machine has 1")),
    ]
    content = {"date": "2026-12-01", "rows": describe_rows(outcomes)}
    write_section(path, "checks", content, device=device, num_gpus=num_gpus)
    return path


def test_without_a_result_every_cell_is_empty(tmp_path: Path) -> None:
    checks, speeds = make_tables(tmp_path).split("\n\n")
    head, _, *rows = checks.splitlines()
    assert head == "| `make gpu-check` | passes if | no GPU has been measured yet |"
    assert len(rows) == len(CHECKS)
    assert all(row.endswith("|  |") for row in [*rows, *speeds.splitlines()[2:]])


def test_a_table_has_a_column_per_gpu_and_none_for_a_cpu(tmp_path: Path) -> None:
    assert _write(tmp_path, device="NVIDIA H100 80GB HBM3", num_gpus=1).name == "gpu_nvidia_h100_80gb_hbm3.json"
    assert _write(tmp_path, device="NVIDIA L4", num_gpus=2).name == "gpu_nvidia_l4_x2.json"
    assert _write(tmp_path, device="AMD EPYC", num_gpus=0, accelerator="cpu").name == "cpu_amd_epyc.json"
    checks, speeds = make_tables(tmp_path).split("\n\n")
    head, _, first, second, third, *_ = checks.splitlines()
    assert head.endswith("| passes if | NVIDIA H100 80GB HBM3, 2026-12-01 | 2 x NVIDIA L4, 2026-12-01 |")
    assert first.endswith("| pass: torch 2.13 | pass: torch 2.13 |")
    assert second.endswith("| fail: 155 ms | fail: 155 ms |")
    assert third.endswith("|  |  |"), "not run: no figure"
    assert "| skipped: needs two GPUs; this machine has 1 |" in checks.splitlines()[-1]
    assert "no GPU has been measured yet" in speeds


def test_the_two_commands_share_a_file_and_keep_each_other_s_results(tmp_path: Path) -> None:
    path = _write(tmp_path, device="NVIDIA L4", num_gpus=1)
    speeds = {"date": "2026-12-02", "rows": {"gpt2": {"verdict": "pass", "headline": "9 tokens/s", "note": ""}}}
    write_section(path, "throughput", speeds, device="NVIDIA L4", num_gpus=1)
    assert {"device", "num_gpus", "checks", "throughput"} == set(json.loads(path.read_text()))
    assert "| pass: 9 tokens/s |" in make_tables(tmp_path)


def test_the_tables_are_written_between_the_markers(tmp_path: Path) -> None:
    docs = tmp_path / "README.md"
    docs.write_text(f"before\n{record.BEGIN}\nold\n{record.END}\nafter\n")
    write_docs(docs, tmp_path)
    assert docs.read_text() == f"before\n{record.BEGIN}\n{make_tables(tmp_path)}\n{record.END}\nafter\n"
    docs.write_text("nothing")
    with pytest.raises(ValueError, match="add both"):
        write_docs(docs, tmp_path)


def test_the_readme_of_the_benchmarks_shows_what_is_recorded() -> None:
    shown = record.DOCS.read_text().partition(record.BEGIN)[2].partition(record.END)[0]
    assert shown.strip() == make_tables(), "python -c 'from gpu_checks.record import write_docs; write_docs()'"
