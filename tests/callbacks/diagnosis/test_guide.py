"""The guide lists the symptoms of the catalogue, and its console output is that of the run it names."""

import re

from support import ROOT

from callbacks.diagnosis.diagnose import CATALOGUE, diagnose_run

GUIDE = (ROOT / "docs/guides/diagnose.md").read_text()


def test_the_table_of_symptoms_is_the_catalogue() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", GUIDE, flags=re.MULTILINE)
    needs = {name: tuple(re.findall(r"`(\w+)`", cell)) for name, _, cell in rows}
    assert [(name, title) for name, title, _ in rows] == [(symptom.name, symptom.title) for symptom in CATALOGUE]
    assert needs == {symptom.name: symptom.needs for symptom in CATALOGUE}


def test_the_output_shown_is_what_is_printed() -> None:
    [block] = re.findall(r"```text\n(.*?)```", GUIDE, flags=re.DOTALL)
    run, *lines = block.splitlines()
    printed = [f"  {line}" for line in diagnose_run(ROOT / run.removesuffix(":")).lines()]
    shown = [line for line in lines if not line.endswith("…")]
    assert shown == [line for line in printed if line in shown]
    assert len(shown) >= 9
    [looked] = [line.removesuffix("…") for line in lines if line.endswith("…")]
    assert any(line.startswith(looked) for line in printed)
