"""mode=plan from the command line: what it prints and writes, and what it rejects."""

import json
from pathlib import Path

import pytest
from report_pages import get_data
from support import run_train

LLAMA = ["mode=plan", "recipe=fsdp_bf16", "model=llama_8b", "data=random_tokens", "plan.hardware=h100x8"]


def test_a_plan_for_other_machines_prints_memory_time_price_and_advice(tmp_path: Path) -> None:
    result = run_train(
        [
            *LLAMA,
            "model.num_layers=4",
            "global_batch_size=256",
            "micro_batch_size=16",
            "plan.dollars_per_hour=2",
            "eval_samples=64",
            f"mode.path={tmp_path}",
        ]
    )
    assert result.returncode == 0, result.stderr
    text = result.stdout + result.stderr
    for words in (
        "1,923,125,248 parameters on 8 x h100",
        "in 2 micro-batches of 16 on each of 8 ranks",
        "DOES NOT FIT",
        "not hidden by computation",
        "price: $",
        "advice: strategy=ddp activation_checkpoint=",
    ):
        assert words in text, words
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] is False
    assert plan["steps"] == 1000
    timeline = plan["timeline"]
    assert all(len(series) == len(timeline["sections"]) for series in timeline["gib"].values())
    totals = [sum(series[i] for series in timeline["gib"].values()) for i in range(len(timeline["sections"]))]
    assert max(totals) == pytest.approx(plan["peak_memory_gib"], abs=0.001)  # thinning lost no peak
    page = (tmp_path / "plan.html").read_text()
    [memory] = [chart for chart in get_data(page)["charts"] if chart["kind"] == "stack"]
    assert len(memory["curves"]) >= 4
    assert "DOES NOT FIT" in page


def test_expected_mfu_overrules_the_estimate(tmp_path: Path) -> None:
    """8 GPUs at half of 989.4 TFLOP/s; 57.9 GFLOP a token by PaLM's count, as the table of references has it."""
    folder = f"mode.path={tmp_path}"
    result = run_train(
        [*LLAMA, "global_batch_size=8", "plan.expect_mfu=0.5", "mode.advise=false", "seq_len=8192", folder]
    )
    assert result.returncode == 0, result.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["mfu"] == pytest.approx(0.5)
    assert plan["tokens_per_second"] == pytest.approx(8 * 0.5 * 989.4e12 / 57.9e9, rel=0.005)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plan.hardware=h1000x8", "no such device is known"),
        ("plan.interconnect=string", "no such link is known"),
        ("plan.memory_gib=-1", "plan.memory_gib=-1"),
        ("plan.expect_mfu=40", "plan.expect_mfu=40"),
        ("global_batch_size=10", "do not divide evenly into"),
        ("mode.max_ranks=4", "whole nodes are planned, and one has 8 ranks"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(override: str, words: str) -> None:
    result = run_train([*LLAMA, "mode.advise=false", override])
    assert result.returncode == 2
    printed = result.stdout + result.stderr
    assert words in printed
    assert "Traceback" not in printed


def test_the_report_of_a_run_shows_its_plan(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = [
        "data=random_tokens",
        "trainer.accelerator=cpu",
        "trainer.max_steps=2",
        "eval_samples=2",
        "save_every=null",
    ]
    planned = run_train(["mode=plan", *run, "mode.advise=false", f"mode.path={folder}"])
    assert planned.returncode == 0, planned.stderr
    trained = run_train([*run, f"hydra.run.dir={folder}"])
    assert trained.returncode == 0, trained.stderr
    page = (folder / "report.html").read_text()
    assert "Memory over one step, as planned" in page


SMALL = ["model.num_layers=4", "model.hidden_size=1024", "model.num_heads=8", "model.ffn_hidden_size=2048"]


def test_a_mesh_has_a_row_for_each_of_its_dimensions(tmp_path: Path) -> None:
    sizes = ["tensor_parallel_size=2", "context_parallel_size=2", "global_batch_size=16"]
    result = run_train([*LLAMA, *SMALL, *sizes, "mode.advise=false", f"mode.path={tmp_path}"])
    assert result.returncode == 0, result.stderr
    text = result.stdout + result.stderr
    assert "mesh: shard 2, context 2, tensor 2" in text
    assert "on each of 2 groups of 4 ranks" in text
    rows = json.loads((tmp_path / "plan.json").read_text())["communication"]
    assert {row["dimension"]: row["ranks"] for row in rows} == {"shard": 4, "tensor": 2, "context": 2}
    page = (tmp_path / "plan.html").read_text()
    assert "Communication, as planned" in page
    assert "<td>tensor</td>" in page


def test_a_search_plans_the_fastest_mesh_that_it_found(tmp_path: Path) -> None:
    search = ["plan.hardware=h100x32", "plan.search=true", "global_batch_size=64", f"mode.path={tmp_path}"]
    result = run_train([*LLAMA, *SMALL, *search])
    assert result.returncode == 0, result.stderr
    text = result.stdout + result.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    best = plan["search"][0]
    assert f"search: {' '.join(best['overrides'])}" in text
    assert plan["step_seconds"] == pytest.approx(best["step_seconds"], rel=0.1)
    assert plan["num_ranks"] == 32
