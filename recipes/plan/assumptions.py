"""User-provided assumptions about the hardware and the data of a planned run: `plan.…=`."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of a plan.

    Attributes:
        hardware: `auto` for this machine, `measured` to also time its operators, else a device and the number per node:
            `h100x8`.
        interconnect: Link between the devices of one node or, with several nodes, between nodes; None is the usual one.
        memory_gib: Memory of a device; None uses the table.
        expect_mfu: Model FLOPs utilization by PaLM's definition; None estimates it from the operators.
        dollars_per_hour: Price of one device; None omits prices.
        images_per_row: Images among the tokens of a row, of a model that reads them there.
        search: Plan the fastest mesh, micro-batch and recomputation that fit, instead of the config's.
    """

    hardware: str
    interconnect: str | None
    memory_gib: Annotated[float, "> 0"] | None
    expect_mfu: Annotated[float, "> 0, <= 1"] | None
    dollars_per_hour: Annotated[float, "> 0"] | None
    images_per_row: Annotated[int, ">= 1"]
    search: bool
