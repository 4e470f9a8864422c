"""A LightningDataModule of one's own, whose loaders decide what a batch is; `recipes.task.own_loaders` resumes them."""

from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as lightning

from recipes.errors import ConfigError


class OwnDataModule:
    """A LightningDataModule of one's own, constructed when the run is built.

    Args:
        module: Constructs it; None: the LightningModule has loaders itself.
    """

    deferred: ClassVar[tuple[str, ...]] = ("module",)
    has_own_loaders: ClassVar[bool] = True

    def __init__(self, *, module: Callable[[], Any] | None) -> None:
        self._make = module

    def construct(self) -> lightning.LightningDataModule | None:
        """Return the data module; None: the LightningModule has loaders itself.

        Raises:
            ConfigError: It is no LightningDataModule.
        """
        if self._make is None:
            return None
        module = self._make()
        if not isinstance(module, lightning.LightningDataModule):
            raise ConfigError(
                f"data.module._target_={type(module).__name__}",
                "it is not a LightningDataModule",
                "data=dataset 'data.train={_target_: …}' 'data.val={_target_: …}' for a torch Dataset",
            )
        return module
