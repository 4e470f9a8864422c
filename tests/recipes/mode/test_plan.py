"""mode=plan from the command line: what it prints and writes, and what it rejects."""

import json
from pathlib import Path

import pytest
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
    assert page.count("<path") >= 7
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
        ("global_batch_size=10", "do not divide into"),
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
