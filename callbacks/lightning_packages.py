"""Accept both packages of Lightning: `lightning.pytorch` and `pytorch_lightning` define each class separately.

Most published modules import the latter, which `lightning` installs beside itself. So what a callback finds in a
Trainer is compared with the classes of both packages, and a callback is an instance of both base classes.
"""

import sys
from typing import Any

from lightning.pytorch import callbacks


def find_classes(*names: str) -> tuple[type, ...]:
    """Return the classes of these names in each imported package, for `isinstance`.

    Args:
        names: Names within the package, such as `strategies.DDPStrategy`. A class that the installed version lacks is
            left out: it has no instances.
    """
    found = (_find_class(package, name) for package in ("lightning.pytorch", "pytorch_lightning") for name in names)
    return tuple(cls for cls in found if cls is not None)


def _find_class(package: str, name: str) -> type | None:
    module, _, cls = name.rpartition(".")
    found: type | None = getattr(sys.modules.get(f"{package}.{module}"), cls, None)
    return found


class Callback(callbacks.Callback):
    """A callback for a Trainer of either package."""

    def __init__(self) -> None:
        _inherit(Callback, "callbacks.Callback")
        super().__init__()


class ProgressBar(callbacks.ProgressBar):
    """A progress bar for a Trainer of either package, which shows its own unless it finds one."""

    def __init__(self) -> None:
        _inherit(ProgressBar, "callbacks.ProgressBar")
        super().__init__()


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's EarlyStopping for a Trainer of either package."""

    def __init__(self, **arguments: Any) -> None:
        # not the other EarlyStopping: the constructor of the first would call that of the second, without arguments
        _inherit(EarlyStopping, "callbacks.Callback")
        super().__init__(**arguments)


def _inherit(cls: type, name: str) -> None:
    """Add the class of `pytorch_lightning` to the bases, after those of `lightning`, once that package is imported.

    Its Trainer and its LightningCLI ask for an instance and a subclass. Importing it here would take a second in every
    other project, and a project may import it after this module: hence at the import and in each constructor.
    """
    other = _find_class("pytorch_lightning", name)
    if other is not None and other not in cls.__mro__:
        cls.__bases__ = (*cls.__bases__, other)


for _cls, _name in ((Callback, "Callback"), (ProgressBar, "ProgressBar"), (EarlyStopping, "Callback")):
    _inherit(_cls, f"callbacks.{_name}")
