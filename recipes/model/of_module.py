"""The place of `model=` where a LightningModule of one's own constructs its model itself."""

from torch import nn


class OfModule(nn.Module):
    """Stands for the model in the config of a run with `task=lightning`; it is never constructed."""
