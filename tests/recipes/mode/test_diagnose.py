"""mode=diagnose: findings of run folders and of anybody's metrics.csv; what is neither is a config error."""

import json
from pathlib import Path

import pytest
from support import ROOT

from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.errors import ConfigError
from recipes.runtime.exit_codes import ExitCode

RECORDED = ROOT / "tests/callbacks/diagnosis/runs"


def start(*overrides: str) -> int:
    composed, mistakes = compose_and_check(["mode=diagnose", *overrides])
    assert composed is not None
    assert mistakes == []
    return run_resolved(composed)


def test_the_findings_of_runs_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = f"mode.runs=[{RECORDED / 'early_decay'},{RECORDED / 'clean_digits'}/metrics.csv]"
    assert start(runs, f"mode.path={tmp_path / 'found.json'}") == 0
    text = capsys.readouterr().out
    assert "1. decayed_too_early (critical): the learning rate is near zero for the last 301 steps" in text
    assert "try: scheduler.num_steps=400" in text
    assert "  no finding" in text
    assert "not checked: not_shuffled, memorizing: needs at least three epochs" in text
    found = json.loads((tmp_path / "found.json").read_text())
    [decayed, clean] = found.values()
    assert decayed["findings"][0]["evidence"][1] == {"what": "lr", "value": 0.0, "first_step": 100, "last_step": 400}
    assert clean["findings"] == []
    assert "overfitting" in clean["examined"]


def test_a_folder_or_a_glob_means_every_run_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(f"mode.runs=[{RECORDED}]") == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(RECORDED))]
    assert len(heads) == len(list(RECORDED.iterdir()))
    assert start(f"mode.runs=[{RECORDED}/clean_*,{RECORDED}/clean_gpt]") == 0
    assert capsys.readouterr().out.count("  no finding\n") == 5


def test_each_run_of_an_export_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f'"{10 * i}","{5 - i / 50}","{5 - i / 50 if i < 100 else i / 20}"\n' for i in range(200))
    (tmp_path / "w.csv").write_text('"Step","good - train/loss","bad - train/loss"\n' + rows)
    assert start(f"mode.runs=[{tmp_path}/w.csv]", f"mode.path={tmp_path / 'found.json'}") == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path}/w.csv: good:\n  no finding\n" in printed
    assert f"{tmp_path}/w.csv: bad:\n  1. diverged (critical)" in printed
    assert list(json.loads((tmp_path / "found.json").read_text())) == [
        f"{tmp_path}/w.csv: good",
        f"{tmp_path}/w.csv: bad",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("metrics.csv", "", "is empty"),
        ("metrics.csv", "epoch,loss\n1,2\n", "has no column of steps"),
        ("notes.txt", "nothing of this kind\n", "has no column of steps"),
        ("config.yaml", "name: x\n", "no run in it has a metrics.csv"),
        (None, "", "there is no such folder"),
    ],
)
def test_what_is_no_run_is_a_mistake(
    tmp_path: Path, name: str | None, content: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name is not None:
        (tmp_path / name).write_text(content)
    run = tmp_path / "nowhere" if name is None else tmp_path / name if name == "notes.txt" else tmp_path
    composed, _ = compose_and_check(["mode=diagnose", f"mode.runs=[{run}]"])
    assert composed is not None
    assert run_resolved(composed) == ExitCode.INVALID_CONFIG
    printed = capsys.readouterr().out
    assert f"1. mode.runs=[{run}" in printed
    assert reason in printed
    assert "type: mode.runs=[<" in printed


@pytest.mark.parametrize(
    ("override", "reason"), [("mode.runs=[]", "no run is named"), ("mode.steps_per_epoch=0", "at least one step")]
)
def test_wrong_settings_are_mistakes(override: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    composed, _ = compose_and_check(["mode=diagnose", f"mode.runs=[{RECORDED}]", override])
    assert composed is not None
    assert run_resolved(composed) == ExitCode.INVALID_CONFIG
    assert reason in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_a_mistake_before_any_run_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no").touch()  # a file where the folder should be
    composed, _ = compose_and_check(
        ["mode=diagnose", f"mode.runs=[{RECORDED / 'clean_gpt'}]", f"mode.path={tmp_path}/no/x.json"]
    )
    assert composed is not None
    assert run_resolved(composed) == ExitCode.INVALID_CONFIG
    output = capsys.readouterr().out
    assert f"mode.path={tmp_path}/no/x.json" in output
    assert "clean_gpt:" not in output


def test_steps_per_epoch_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(f"mode.runs=[{RECORDED / 'clean_gpt'}]", "mode.steps_per_epoch=50") == 0
    assert "not checked: not_shuffled" not in capsys.readouterr().out


def test_an_error_has_three_clauses() -> None:
    from recipes.mode.diagnose import diagnose

    composed, _ = compose_and_check(["mode=diagnose", "mode.runs=[x]"])
    assert composed is not None
    with pytest.raises(ConfigError) as raised:
        diagnose(composed, runs=[], path=None, steps_per_epoch=None, diagnose_run=lambda path: path)
    assert str(raised.value) == "mode.runs=[]: no run is named; type mode.runs=[logs/<name>]"


def test_a_run_that_has_logged_nothing_yet_is_named_and_the_others_are_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("young", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text("")
    (tmp_path / "old" / "metrics.csv").write_text("step,loss\n1,2\n2,1\n")
    assert start(f"mode.runs=[{tmp_path}]") == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'young'}: no metrics.csv yet\n" in printed
    assert f"{tmp_path / 'old'}:\n  no finding\n" in printed
