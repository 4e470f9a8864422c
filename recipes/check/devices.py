"""How many ranks carry the run: what is typed, what the machine has, what a launcher has started."""

from collections.abc import Mapping
from typing import Any

from recipes.mistake import Mistake
from recipes.ranks import ranks_of


def count_ranks(config: Mapping[str, Any]) -> tuple[int | None, list[Mistake]]:
    """The ranks of a run, None where they are a mistake; and that mistake.

    torch is asked only where there is a GPU and several ranks may use it.
    """
    devices, num_nodes = config["trainer"]["devices"], config["trainer"]["num_nodes"]
    if not _are_devices(devices):
        shown = str(devices).replace(" ", "")
        why = "it takes a number from 1, a list of GPUs, or auto"
        return None, [Mistake(f"trainer.devices={shown}", why, "trainer.devices=auto")]
    if num_nodes < 1:
        return None, []  # out of its range, which is told there
    try:
        return ranks_of(config).world_size, []
    except Mistake as mistake:
        return None, [mistake]


def _are_devices(devices: object) -> bool:
    if isinstance(devices, list):
        return bool(devices) and len(set(devices)) == len(devices) and min(devices) >= 0
    return devices in ("auto", -1) or (isinstance(devices, int) and devices > 0)
