"""A project that imports `pytorch_lightning`, as most do, gets the same callbacks as one that imports `lightning`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

CALLBACKS = Path(__file__).parents[2] / "callbacks"


def test_a_trainer_of_the_other_package_gets_what_a_trainer_of_this_one_gets() -> None:
    # in a process of its own: the import would change the base classes of every other test
    worker = Path(__file__).parent / "third_party_pl.py"
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "rollback": {"rollbacks": 1, "skipped_steps": 4},
        "bars": ["ProgressLine"],
        "stateful": 2,  # the EarlyStopping of each package
        "no longer listed": True,
        "of one package": [],
        "profiled": True,  # two torch profilers at a time end in a segmentation fault
        "classes": 6,
    }


def test_no_class_of_one_package_alone_is_compared_with_an_object() -> None:
    wrong = []
    for path in CALLBACKS.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and "lightning." in (n.module or "")]
        classes = {alias.asname or alias.name for each in imports for alias in each.names}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("isinstance", "issubclass"):
                names = {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
                wrong += [f"{path.name}:{call.lineno}" for _ in names & classes]
    assert wrong == []
