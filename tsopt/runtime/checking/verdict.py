"""The verdict on a candidate: whether it computes what the model does, and by which test."""

from __future__ import annotations

from dataclasses import dataclass

INACCURATE = "not accurate enough"
ORDER = ("bits", "element", "float64", "rounding", "decision", "limit")  # from the strictest test to the weakest


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on all outputs for all input sets.

    max_difference: the largest |candidate - eager| over finite values, on inputs of ordinary size.
    test: the weakest test that was needed: bits < element < float64 < rounding < decision < limit.
    inputs: the input sets compared; `skipped`: those that were not, and why.
    differences: the largest |candidate - eager| over finite values on each of `inputs`.
    sizes: the largest finite |eager| on each of `inputs`; 0 where no output is a float.
    notes: differences on NaN and infinities that do not decide.
    """

    ok: bool
    test: str
    max_difference: float
    inputs: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    differences: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()

    @property
    def status(self) -> str:
        """That of a row: `not accurate enough` where a lower precision was asked for, and loses more than it may."""
        if self.ok:
            return "ok"
        return INACCURATE if self.test == "limit" else "wrong"

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.status}: {self.reason}"
        how = {
            "bits": "bit-equal",
            "element": "equal within rounding",
            "float64": "as close to float64 as eager",
            "rounding": "as close to eager as eager is to itself with inputs that are off by one rounding",
            "decision": "equal except for ties within rounding",
            "limit": "as close to eager as its precision allows",
        }[self.test]
        sets = "1 input set" if len(self.inputs) == 1 else f"{len(self.inputs)} input sets"
        return f"{how} on {sets}, max difference {self.max_difference:.2e}"
