"""What a start does not import, unless something that the config names may need it."""

import subprocess
import sys

import pytest
from support import ROOT, composed_config, resolved

from recipes.entry.light_import import without_unused_packages

PROGRAM = """
import sys
from recipes.entry.light_import import without_unused_packages
with without_unused_packages([{target!r}]):
    import recipes.build
print(sorted({{"scipy", "transformers", "matplotlib"}} & set(sys.modules)))
import torchmetrics.utilities.imports as flags
print(bool(flags._SCIPY_AVAILABLE), bool(flags._MATPLOTLIB_AVAILABLE))
"""


@pytest.mark.parametrize(
    ("target", "imported"),
    [
        ("torchmetrics.classification.MulticlassF1Score", []),
        ("my_metrics.F1", ["matplotlib", "scipy", "transformers"]),
    ],
)
def test_large_packages_are_imported_where_somebody_may_need_them(target: str, imported: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM.format(target=target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # once Lightning is imported, torchmetrics finds what is installed, as ever
    assert done.stdout.splitlines() == [str(imported), "True True"]


@pytest.mark.parametrize("overrides", [[], ["model=resnet18"], ["logger=[wandb,tensorboard]"]])
def test_no_shipped_config_needs_them(overrides: list[str]) -> None:
    from lightning_utilities.core import imports

    with without_unused_packages(resolved(composed_config(*overrides)).list_targets()):
        assert not imports.package_available("scipy")
    assert imports.package_available("scipy")
