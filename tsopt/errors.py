"""The error classes. Owns what a message must say; imports nothing of tsopt and never torch."""

from __future__ import annotations

from typing import Any

LONGEST = 2000  # characters per part of a message: names in an untrusted file can be of any length


class TsoptError(Exception):
    """What went wrong, where, why, and what to do about it.

    Args:
        what: one sentence, the fact.
        where: the user's module path, file and line, or the file on disk.
        why: the cause, in the words of whoever refused.
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
        return _again, (type(self), self.what, self.where, self.why, self.fix)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _again(cls: type[TsoptError], what: str, where: str | None, why: str | None, fix: str | None) -> TsoptError:
    """An error as it was when it was pickled: past the words that classes add."""
    made = cls.__new__(cls)
    TsoptError.__init__(made, what, where=where, why=why, fix=fix)
    return made


class UsageError(TsoptError):
    """An option, a flag or a model file is not what it must be."""


class CaptureError(TsoptError):
    """The model cannot be turned into a Program."""


class NotReady(CaptureError):
    """The model is not one to run: it has no weights yet, NaN among them, or is in training mode; or is no model."""


class GraphBreakError(CaptureError):
    """The model runs, but is not a single graph of tensor operations. `fix` is followed by what can still be done."""

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        still = "as it is, tsopt.optimize(model, x) runs it in parts, or eager"
        super().__init__(what, where=where, why=why, fix=f"{fix}; {still}" if fix else still)


class DataDependentError(GraphBreakError):
    """Python goes on by the values of tensors."""


class InvalidProgram(TsoptError):
    """A Program breaks one of its numbered invariants."""


class RuleError(TsoptError):
    """A rewrite rule returned something that does not fit the value it replaces."""


class PassError(TsoptError):
    """A pass broke the Program, misreported what it did, or did not come to an end."""


class BackendError(TsoptError):
    """A backend cannot take this Program, or its library is missing."""


class NoGain(BackendError):
    """A backend would run this Program just as another one does already, or a lower precision would change nothing."""


class SignatureError(TsoptError):
    """A call does not fit the signature that the program was captured for."""


class IndexOutOfRange(TsoptError, IndexError):
    """A call holds an index that does not exist, where PyTorch raises IndexError."""


class IndexRefused(TsoptError, RuntimeError):
    """A call holds an index that does not exist, where PyTorch raises RuntimeError."""


class WeightsChangedError(TsoptError):
    """The model's weights are no longer those that something was made of."""


class AccuracyError(TsoptError):
    """A candidate does not compute what the model computes."""

    exit_code = 1


class BundleError(TsoptError):
    """A bundle on disk is missing, damaged, hostile, or from a newer version."""
