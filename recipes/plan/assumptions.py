"""What a person says about the machines that a run will get: `plan.…=`."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a plan assumes.

    Attributes:
        hardware: `auto` for this machine, `measured` to time the operators on it, else a device and how many of them a
            node has: `h100x8`.
        interconnect: Link between the devices of one node, or, with several nodes, between these; None: the usual one.
        memory_gib: Memory of a device; None: what the table says.
        expect_mfu: Model FLOPs utilization by PaLM's count; None: estimated from the operators.
        dollars_per_hour: Price of one device; None: no price.
        search: Plan the fastest mesh, micro-batch and recomputation that fit, instead of those of the config; None, in
            the config of an older run: no.
    """

    hardware: str
    interconnect: str | None
    memory_gib: Annotated[float, "> 0"] | None
    expect_mfu: Annotated[float, "> 0, <= 1"] | None
    dollars_per_hour: Annotated[float, "> 0"] | None
    search: bool | None = None
