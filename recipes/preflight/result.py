"""What a check found, and how a line of the console says it."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "look", "skip", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one check.

    Attributes:
        check: Its name.
        status: `look` shows something that only a person can judge; `skip`: it does not apply.
        found: What was measured, against what was expected.
        remedy: What to do about it; None: nothing is to be done.
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
        check: Its name.
        found: What was measured, against what was expected.
        passes: Whether it is as it should be.
        fails: Whether it has failed if not; else it is to be looked into.
        remedy: What to do about it then.
    """
    if passes:
        return Result(check=check, status="pass", found=found)
    return Result(check=check, status="fail" if fails else "warn", found=found, remedy=remedy)
