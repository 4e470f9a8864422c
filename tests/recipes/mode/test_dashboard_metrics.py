"""The panels against the metrics: every metric that the code writes has a panel, and no panel shows another one."""

import ast
import fnmatch
import re

import yaml
from support import ROOT

from callbacks.generation_eval import GenerationEval
from callbacks.zero_shot import ZeroShot
from recipes.loss.image_text import PairLoss
from recipes.loss.nt_xent import NTXent
from recipes.loss.policy import GRPO
from recipes.loss.ppo import PPO
from recipes.reward import TOTAL
from recipes.task.distillation import Distillation
from recipes.task.image_text import ImageText

SPEC = yaml.safe_load((ROOT / "conf" / "dashboard" / "default.yaml").read_text())["sections"]
ON_PANELS = [name for section in SPEC for panel in section["panels"] for name in panel["metrics"]]
# metrics without a panel, each with the reason
NO_PANEL = {
    "optimizer/*/*/*": "a tensor of a checkpoint",
    "train/*": "named by a loss; the report draws what no panel names",
    "val/*": "named by a loss",
}


def written_names() -> set[str]:
    """Return the metric names that the code writes: keys of dicts and rows, names that are yielded or logged."""
    found = validated_names()
    for path in [*ROOT.glob("recipes/**/*.py"), *ROOT.glob("callbacks/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            written: list[ast.expr | None] = []
            if isinstance(node, ast.Dict):
                written = list(node.keys)
            elif isinstance(node, ast.DictComp):
                written = [node.key]
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                written = [node.slice]
            elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                written = node.value.elts[:1]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                written = node.args[:1] if node.func.attr == "log" else []
            found |= {name for node in written if (name := _name(node)) is not None}
    return {name for name in found if re.fullmatch(rf"lr(/\*)?|({_prefixes()})/[\w/*]+", name)}


def validated_names() -> set[str]:
    """Return the metrics of a validation: the loss, and those of every option of conf/metrics."""
    options = [yaml.safe_load(path.read_text()) for path in (ROOT / "conf" / "metrics").glob("*.yaml")]
    names = {"loss"} | {name for option in options for name in option}
    generated = {*GenerationEval.validation_metrics, TOTAL, f"{TOTAL}/*"}  # of answers, whatever the validation
    generated |= {*ZeroShot.validation_metrics, *ImageText.validation_metrics}
    of_splits = {f"val/{place}{name}" for name in names for place in ("", "*/")}  # of the split, and of further data
    of_tasks = {f"train/{name}" for name in Distillation.training_measures}
    of_tasks |= {f"{split}/{name}" for name in (*NTXent.measures, *PairLoss.measures) for split in ("train", "val")}
    of_tasks |= {name for loss in (GRPO, PPO) for name in loss.measures}  # which have a prefix of their own
    return of_splits | of_tasks | {f"val/{name}" for name in generated}


def _name(node: ast.expr | None) -> str | None:
    """Return the text of a literal; each value of an f-string becomes `*`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
        return "".join(str(part) for part in parts)
    return None


def _prefixes() -> str:
    return "|".join({name.partition("/")[0] for name in documented_metrics() if "/" in name})


def documented_metrics() -> set[str]:
    """Return the first column of the page of metrics; a placeholder becomes `*`."""
    lines = (ROOT / "docs/reference/metrics.md").read_text().partition("| metric | meaning |")[2].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    return {re.sub(r"<\w+>|…", "*", name) for name in names}


def test_every_metric_on_a_panel_is_written_by_the_code() -> None:
    assert set(ON_PANELS) - written_names() == set()


def test_every_metric_that_the_code_writes_is_on_a_panel() -> None:
    missing = {
        name
        for name in written_names() - NO_PANEL.keys()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ON_PANELS)
    }
    assert missing == set()


def test_every_metric_that_the_code_writes_is_documented() -> None:
    documented = documented_metrics()
    missing = {
        name
        for name in written_names() - NO_PANEL.keys()
        if not any(fnmatch.fnmatchcase(name, known) or fnmatch.fnmatchcase(known, name) for known in documented)
    }
    assert missing == set()


def test_every_documented_metric_is_on_a_panel() -> None:
    for name in documented_metrics():
        assert any(fnmatch.fnmatchcase(metric, name) or fnmatch.fnmatchcase(name, metric) for metric in ON_PANELS), name
