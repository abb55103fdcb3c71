"""The error classes and the parts of a message. Imports neither torch nor anything else of tsopt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 2000  # characters per part of a message: names in an untrusted file can be of any length


class TsoptError(Exception):
    """Base class of all errors: what happened, where, why, and how to fix it.

    Args:
        what: what happened, in one sentence.
        where: the module path, file and line in the user's code, or the file on disk.
        why: the cause, in the words of the library that failed where there is one.
        fix: what to write or run next.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = _short(what)
        self.where, self.why, self.fix = (None if text is None else _short(text) for text in (where, why, fix))
        rows = (("where", self.where), ("why", self.why), ("fix", self.fix))
        super().__init__("\n".join([self.what, *(f"  {name}: {text}" for name, text in rows if text)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.what, self.where, self.why, self.fix), vars(self)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _again(cls: type[TsoptError], what: str, where: str | None, why: str | None, fix: str | None) -> TsoptError:
    """Rebuilds a pickled error without adding the text that its class adds again."""
    made = cls.__new__(cls)
    TsoptError.__init__(made, what, where=where, why=why, fix=fix)
    return made


class UsageError(TsoptError):
    """An option, a command-line flag or a model file is invalid."""


class CaptureError(TsoptError):
    """The model cannot be captured as a Program.

    Attributes:
        admits: whether calls of given sizes, by tensor and axis, may be captured together with the call that was
            traced; None unless the model does something else for the calls of one capture.
    """

    admits: Callable[[Mapping[tuple[int, int], int]], bool] | None = None


class NotReady(CaptureError):
    """The model is not ready: it has no weights, has NaN weights, or is in training mode; or it is not a model."""


class GraphBreakError(CaptureError):
    """The model runs, but cannot be captured as one graph. `fix` ends with what `optimize` can still do."""

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        still = "without changes to the model, tsopt.optimize(model, x) runs it partitioned or in eager mode"
        super().__init__(what, where=where, why=why, fix=f"{fix}; {still}" if fix else still)


class DataDependentError(GraphBreakError):
    """Python control flow depends on the values of tensors."""


class InvalidProgram(TsoptError):
    """A Program violates one of its numbered invariants."""


class RuleError(TsoptError):
    """A rewrite rule raised, returned something that cannot replace the matched value, or is declared wrongly.

    Args:
        rule: its name; empty outside of a pass.
    """

    def __init__(
        self,
        what: str,
        *,
        rule: str = "",
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.rule = rule


class PassError(TsoptError):
    """A pass broke the Program, misreported what it did, or did not terminate."""


class BackendError(TsoptError):
    """A backend does not support this Program, or its library is missing."""


class NoGain(BackendError):
    """A backend would run this Program exactly as another one does, or a lower precision would change nothing."""


class SignatureError(TsoptError):
    """A call does not match the signature that the program was captured for."""


class IndexOutOfRange(TsoptError, IndexError):
    """A call contains an out-of-range index for which PyTorch raises IndexError."""


class IndexRefused(TsoptError, RuntimeError):
    """A call contains an out-of-range index for which PyTorch raises RuntimeError."""


class WeightsChangedError(TsoptError):
    """The model's weights have changed since it was optimized."""


class AccuracyError(TsoptError):
    """A candidate does not compute the same values as the model."""

    exit_code = 1


class BundleError(TsoptError):
    """A bundle on disk is missing, damaged, hostile, or from a newer version."""


def summary_of(error: BaseException) -> str:
    """The type and the first line of an error of somebody else's code."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
