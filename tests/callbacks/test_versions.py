"""The callbacks with the lowest and the newest torch and Lightning that pyproject.toml allows: `make test-long`."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OF_THE_TESTS = ("pytest", "pytest-timeout", "setuptools", "scikit-learn", "rich", "matplotlib", "tensorboard")
# of the recipes, of a browser, and of files alone
LEFT_OUT = ("test_declared_facts.py", "test_versions.py", "report/test_browser.py", "diagnosis")


def find_requirements(versions: str) -> list[str]:
    """Return what pip must install: torch and Lightning, for the lowest versions pinned to their lower bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if versions == "newest":
        return list(project["dependencies"])
    bounds = {
        each.name: [spec.version for spec in each.specifier if spec.operator == ">="]
        for each in map(Requirement, project["dependencies"])
    }
    return [f"{name}=={lowest}" for name, [lowest] in bounds.items()]


@pytest.mark.slow
@pytest.mark.fresh_python
@pytest.mark.timeout(3 * 3600)  # several gigabytes to install, on any network
@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_the_callbacks_pass_their_tests_with_the_versions_that_they_declare(versions: str, tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LONG_TESTS")}
    try:
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*install, *find_requirements(versions), *OF_THE_TESTS], check=True, env=environment)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--confcutdir"]
        command += [str(ROOT / "tests/callbacks"), str(ROOT / "tests/callbacks")]
        command += [f"--ignore={ROOT / 'tests/callbacks' / name}" for name in LEFT_OUT]
        command += ["-k", "not terminal_of_a_recipe"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    finally:
        shutil.rmtree(python.parents[1], ignore_errors=True)
    assert done.returncode == 0, done.stdout[-20_000:]
    print(done.stdout.splitlines()[-1])
