"""Import Lightning without the three large packages that torchmetrics imports on the way for metrics nobody named.

`import lightning` imports torchmetrics (1.9), which imports scipy, transformers and matplotlib where it finds them:
a third of the time in which a run starts. They serve its metrics of sound and generated text, and plots of metrics.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.traits import list_nodes

_HIDDEN = frozenset({"scipy", "transformers", "matplotlib"})
# constructors that need none of them from torchmetrics; whatever else a config names may
_NEED_NONE = (
    "recipes.",
    "callbacks.",
    "torch.",
    "lightning.",
    "torchmetrics.classification.",
    "torchmetrics.regression.",
)


@contextlib.contextmanager
def without_unused_packages(config: Mapping[str, Any]) -> Iterator[None]:
    """Hide the packages from torchmetrics within the context, if no part of the config can need them.

    They stay importable for everybody else, and afterwards for torchmetrics too.

    Args:
        config: Plain values.
    """
    if not all(node["_target_"].startswith(_NEED_NONE) for _, node in list_nodes(config)):
        yield
        return
    from lightning_utilities.core import imports

    check, is_available = imports.RequirementCache.__bool__, imports.package_available

    def check_unless_hidden(requirement: imports.RequirementCache) -> bool:
        name = (requirement.requirement or "").partition(">")[0]
        return name not in _HIDDEN and check(requirement)

    imports.RequirementCache.__bool__ = check_unless_hidden  # type: ignore[assignment, method-assign]
    imports.package_available = lambda name: name not in _HIDDEN and is_available(name)  # type: ignore[assignment]
    try:
        yield
    finally:
        imports.RequirementCache.__bool__ = check  # type: ignore[assignment, method-assign]
        imports.package_available = is_available
