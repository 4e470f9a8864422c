"""Real runs that were made to fail, and healthy ones: the first finding is the fault, and nothing is found in the rest.

Their curves were recorded by `python benchmarks/diagnose.py`.
"""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support import ROOT

from callbacks.diagnosis.diagnose import CATALOGUE, diagnose, diagnose_run
from callbacks.diagnosis.finding import Finding
from callbacks.diagnosis.read import read_run
from recipes.config import compose_and_check

RUNS = Path(__file__).parent / "runs"
ROWS = json.loads((ROOT / "benchmarks/results/diagnose.json").read_text())["rows"]
EXPECTED = {row["run"].replace(" ", "_"): row["made to show"].replace(" ", "_") for row in ROWS}
FAILING = [name for name, fault in EXPECTED.items() if fault != "nothing"]
CLEAN = [name for name, fault in EXPECTED.items() if fault == "nothing"]
RECIPES = [name for name in EXPECTED if (RUNS / name / "config.yaml").is_file()]


def get_findings(name: str) -> list[Finding]:
    return diagnose(RUNS / name)


@pytest.mark.parametrize("name", FAILING)
def test_the_first_finding_is_the_fault_of_the_run(name: str) -> None:
    assert get_findings(name)[0].name == EXPECTED[name]


def test_the_measured_table_is_what_is_found_now() -> None:
    for row in ROWS:
        names = [finding.name.replace("_", " ") for finding in get_findings(row["run"].replace(" ", "_"))] or ["none"]
        assert (row["first finding"], row["others"]) == (names[0], ", ".join(names[1:]))


@pytest.mark.parametrize("name", CLEAN)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    assert get_findings(name) == []


def test_twelve_runs_fail_and_five_are_healthy_and_all_are_recorded_in_small_files() -> None:
    assert len(FAILING) >= 12
    assert len(CLEAN) >= 5
    assert {path.name for path in RUNS.iterdir()} == EXPECTED.keys()
    sizes = {path.parent.name: path.stat().st_size for path in RUNS.glob("*/metrics.csv")}
    assert max(sizes.values()) < 25_000


@pytest.mark.parametrize("name", FAILING)
def test_evidence_lies_within_the_run_and_every_cause_has_a_test(name: str) -> None:
    run = read_run(RUNS / name)
    for finding in get_findings(name):
        assert finding.evidence
        assert finding.causes
        for evidence in finding.evidence:
            assert run.first_step <= evidence.first_step <= evidence.last_step <= run.last_step
        assert all(cause.text and cause.test for cause in finding.causes)


def test_every_override_that_is_advised_composes() -> None:
    advised = {
        re.sub(r"=\S*", "", cause.test): shlex.split(cause.test)  # one of each kind
        for name in RECIPES
        for finding in get_findings(name)
        for cause in finding.causes
        if "=" in cause.test.split()[0] and "resume=" not in cause.test
    }
    assert len(advised) >= 12
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    values, choices = [], []
    for overrides in advised.values():
        is_choice = any(override.lstrip("+").partition("=")[0] in groups for override in overrides)
        (choices if is_choice else values).append(overrides)
    together = {override.partition("=")[0]: override for overrides in values for override in overrides}
    for overrides in [*choices, list(together.values())]:
        assert compose_and_check(overrides)[1] == [], overrides


def test_an_advised_learning_rate_is_computed_from_that_of_the_run() -> None:
    [finding] = get_findings("no_warmup")
    assert [cause.test for cause in finding.causes][1:] == ["optimizer.lr=0.06", "trainer.gradient_clip_val=1.0"]


def test_a_project_of_somebody_else_is_advised_in_plain_words() -> None:
    for name in set(EXPECTED) - set(RECIPES):
        for finding in get_findings(name):
            for cause in finding.causes:
                assert not any(word in cause.test for word in ("optimizer.", "trainer.", "mode=", "callbacks")), cause


def copy_with(folder: Path, name: str, change: dict[str, float]) -> Path:
    """Copy the curves of a run with some columns multiplied, and without its config."""
    with (RUNS / name / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            changed = {key: str(float(row[key]) * factor) for key, factor in change.items() if row.get(key)}
            writer.writerow(row | changed)
    return folder


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in RECIPES])
def test_findings_do_not_depend_on_the_unit_of_the_loss_the_norm_or_the_step(name: str, tmp_path: Path) -> None:
    for factor in (1e-3, 7.0):
        change = {"train_loss": factor, "val_loss": factor, "grad_norm": factor, "step": 10}
        names = [finding.name for finding in diagnose(copy_with(tmp_path, name, change))]
        assert names == [finding.name for finding in get_findings(name)]


def test_a_shuffled_order_of_rows_changes_nothing_but_a_note(tmp_path: Path) -> None:
    lines = (RUNS / "bad_batches" / "metrics.csv").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.csv").write_text("".join([lines[0], *lines[200:], *lines[1:200]]))
    diagnosis = diagnose_run(tmp_path)
    assert list(diagnosis.findings) == get_findings("bad_batches")
    assert diagnosis.notes == ["the steps go back 1 times; the later row of a repeated step counts"]


def test_a_run_that_is_still_running_is_examined_as_far_as_it_is(tmp_path: Path) -> None:
    for num_rows in (1, 2, 5, 12, 40, 80):
        for name in EXPECTED:
            folder = tmp_path / f"{name}_{num_rows}"
            shutil.copytree(RUNS / name, folder)
            lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
            (folder / "metrics.csv").write_text("".join(lines[: num_rows + 1]))
            for file in ("summary.json", "events.jsonl"):
                (folder / file).unlink(missing_ok=True)
            findings = [finding.name for finding in diagnose(folder)]
            if EXPECTED[name] == "nothing":
                assert findings == [], (name, num_rows)


def test_every_symptom_of_the_catalogue_has_a_run_or_a_curve_that_shows_it() -> None:
    found = {finding.name for name in FAILING for finding in get_findings(name)}
    drawn = "".join(Path(__file__).with_name(f"test_{of}.py").read_text() for of in ("symptoms", "rewards"))
    missing = [symptom.name for symptom in CATALOGUE if symptom.name not in found and f'"{symptom.name}"' not in drawn]
    assert missing == []
