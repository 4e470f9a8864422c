"""What the diagnosis of a run found, near the top of its page. Escaped HTML, no Lightning."""

from html import escape

from ..diagnosis.diagnose import Diagnosis, examine
from ..diagnosis.finding import Finding
from ..diagnosis.run import make_run
from .html import section
from .run_record import RunRecord, get_status

_CLASSES = {"critical": "bad", "warning": "warn", "note": "warn"}


def findings_section(run: RunRecord) -> str:
    """Return a card of findings with their steps, or one line that there is none; empty without a training loss."""
    found = make_run(run.series, folder=run.folder, config=run.config, status=get_status(run), events=run.events)
    return _card(examine(found)) if "loss" in found.curves else ""


def _card(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return f'<p class="legend">No finding among {len(diagnosis.examined)} symptoms looked for</p>'
    return section("Findings", "".join(map(_item, diagnosis.findings)), id_="findings")


def _item(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(str(item))}</li>" for item in finding.evidence)
    causes = "".join(f"<li>{escape(cause.text)}: <code>{escape(cause.test)}</code></li>" for cause in finding.causes)
    title = escape(finding.name.replace("_", " "))
    pill = f'<span class="status {_CLASSES[finding.severity]}">{escape(finding.severity)}</span>'
    return f"<p>{pill} <b>{title}</b>: {escape(finding.meaning)}</p><ul>{evidence}</ul><ol>{causes}</ol>"
