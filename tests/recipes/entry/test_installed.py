"""The console script of a wheel that was installed without the packages of the recipes."""

import subprocess
import sys

from support import ROOT


def test_without_the_packages_of_the_recipes_the_script_says_what_to_install() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from recipes.entry.installed import main; main()"
    # -S: without site-packages
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "type: pip install 'lightning-recipes[recipes]'"
    assert "Traceback" not in done.stderr
