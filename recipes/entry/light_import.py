"""Import Lightning without three large packages that torchmetrics imports for unused metrics.

`import lightning` imports torchmetrics (1.9), which imports scipy, transformers and matplotlib if installed: a third
of a run's startup time. They serve its audio and text generation metrics, and plots of metrics.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

_HIDDEN = frozenset({"scipy", "transformers", "matplotlib"})
# constructors that need none of them from torchmetrics; any other in a config may
_NEED_NONE = (
    "recipes.",
    "callbacks.",
    "torch.",
    "lightning.",
    "torchmetrics.classification.",
    "torchmetrics.regression.",
)


@contextlib.contextmanager
def without_unused_packages(targets: Iterable[str]) -> Iterator[None]:
    """Hide the packages from torchmetrics within the context, unless one of the run's constructors may need them.

    They stay importable elsewhere, and afterwards in torchmetrics too.

    Args:
        targets: Dotted paths of everything that the run instantiates.
    """
    if not all(target.startswith(_NEED_NONE) for target in targets):
        yield
        return
    from lightning_utilities.core import imports

    module: Any = imports
    check, is_available = imports.RequirementCache.__bool__, imports.package_available

    def check_unless_hidden(requirement: imports.RequirementCache) -> bool:
        name = (requirement.requirement or "").partition(">")[0]
        return name not in _HIDDEN and check(requirement)

    module.RequirementCache.__bool__ = check_unless_hidden
    module.package_available = lambda name: name not in _HIDDEN and is_available(name)
    try:
        yield
    finally:
        module.RequirementCache.__bool__ = check
        imports.package_available = is_available
