"""Result of a check, and its console output."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "look", "skip", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one check.

    Attributes:
        check: Name of the check.
        status: `look` needs human judgment; `skip` means that it does not apply.
        found: Measured and expected values.
        remedy: What to do about it; None if nothing.
    """

    check: str
    status: Status
    found: str
    remedy: str | None = None

    def lines(self) -> list[str]:
        """Return the result for the console."""
        shown = self.status.upper() if self.status in ("warn", "fail") else self.status
        first = f"{shown:<4}  {self.check:<34}  {self.found}"
        return [first] if self.remedy is None else [first, f"      {self.remedy}"]


def judge(check: str, found: str, *, passes: bool, fails: bool = True, remedy: str) -> Result:
    """Return the outcome of a check that passes, or has a remedy.

    Args:
        check: Name of the check.
        found: Measured and expected values.
        passes: Whether the check passes.
        fails: Whether not passing is a failure; False asks for a look.
        remedy: What to do if it does not pass.
    """
    if passes:
        return Result(check=check, status="pass", found=found)
    return Result(check=check, status="fail" if fails else "warn", found=found, remedy=remedy)
