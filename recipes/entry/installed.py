"""Console script `lightning-recipes`: runs train.py of an installed wheel like `python train.py` in a clone.

In the folder of a project it adds the options and the code of that project.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

_INVALID = 2  # `ExitCode.INVALID_CONFIG`: `recipes` cannot be imported before its folder is on `sys.path`


def main(command: str = "lightning-recipes") -> None:
    """Put the installed folder first on `sys.path`, as Python does for a script, open a project, and run train.py.

    Args:
        command: What has been typed to start it, for the commands that it prints.
    """
    if importlib.util.find_spec("hydra") is None:  # the callbacks need none of the recipes' packages
        print(
            "lightning-recipes was installed for its callbacks; the recipes need more packages\n"
            "type: pip install 'lightning-recipes[recipes]'",
            file=sys.stderr,
        )
        sys.exit(_INVALID)
    root = Path(__file__).parents[2]  # contains recipes/ and callbacks/
    sys.path.insert(0, str(root))
    from recipes.errors import COMMAND_VARIABLE
    from recipes.project import NEW, open_project

    os.environ[COMMAND_VARIABLE] = command
    if sys.argv[1:2] != [NEW]:
        sys.argv[1:1] = open_project(sys.argv[1:])
    runpy.run_path(str(root / "train.py"), run_name="__main__")
