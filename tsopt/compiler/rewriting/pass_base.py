"""What a pass is: how it is declared, the limits that it keeps to, and what it reports of its rewrites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tsopt.compiler.graph.program import Numerics, Program
from tsopt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Done:
    """A rewrite that was applied: the rule (or the pass), and where in the user's model."""

    rule: str
    where: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A near miss: a rewrite that was not applied, and the condition that failed."""

    rule: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that a pass reports."""

    done: tuple[Done, ...] = ()
    declined: tuple[Declined, ...] = ()
    numerics: Numerics = Numerics.EXACT


@dataclass
class Limits:
    """The limits of a run.

    numerics: the weakest class of rewrite that may be applied.
    fuel: how many more rewrites may be applied; None for no limit. Used to find a wrong rewrite by bisection.
    without: names of the rules and passes to leave out.
    on_rewrite: called right before each rewrite.
    """

    numerics: Numerics = Numerics.ROUNDING
    fuel: int | None = None
    without: frozenset[str] = frozenset()
    on_rewrite: Callable[[], None] | None = None

    def take(self) -> bool:
        """Takes one unit of fuel; call it right before a rewrite. False if there is none left."""
        if self.fuel is not None:
            self.fuel -= 1
            if self.fuel < 0:
                return False
        if self.on_rewrite is not None:
            self.on_rewrite()
        return True


class Named(Protocol):
    """A rule, as the pipeline knows it."""

    @property
    def name(self) -> str: ...


class Pass(ABC):
    """Edits a program in place: a private copy of the user's. The result depends only on the program.

    Attributes:
        name: the name in records and for `--without`.
        numerics: the strictest class among its rewrites; the pass is skipped if not even that is allowed.
        size_dependent: whether its rewrites depend on a cost estimate, and so on the sizes of values.
        rules: the rules that it applies, each of which can be left out by name.
    """

    __slots__ = ()
    name: str
    numerics: ClassVar[Numerics] = Numerics.EXACT
    size_dependent: ClassVar[bool] = False
    rules: Sequence[Named] = ()

    @abstractmethod
    def run(self, program: Program, limits: Limits) -> Changes:
        """Edits the program, and returns the rewrites and the near misses."""


def passes_of(given: Iterable[Pass | Repeat]) -> tuple[Pass | Repeat, ...]:
    """The passes that a user has given, as a tuple.

    Raises:
        UsageError: something else is among them, or they are not in a tuple.
    """
    if isinstance(given, (Pass, Repeat, str)) or not isinstance(given, Iterable):
        raise UsageError(
            f"passes must be a tuple of passes, got a {type(given).__name__}",
            fix="pass a tuple: (my_pass,), or (*tsopt.STANDARD, my_pass) to run it after all others",
        )
    passes = tuple(given)
    other = next((item for item in passes if not isinstance(item, (Pass, Repeat))), None)
    if isinstance(other, type):
        raise UsageError(f"among the passes is the class {other.__name__}", fix=f"pass an instance: {other.__name__}()")
    if other is not None:
        raise UsageError(
            f"among the passes is a {type(other).__name__}", fix='put rules into a pass: RulePass("mine", (my_rule,))'
        )
    return passes


@dataclass(frozen=True, slots=True)
class Repeat:
    """Runs its passes in turn until none of them changes the program, for at most `limit` rounds.

    Raises:
        UsageError: an item is not a pass, or the number of rounds is less than 1.
    """

    passes: tuple[Pass | Repeat, ...]
    limit: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", passes_of(self.passes))
        if not isinstance(self.limit, int) or self.limit < 1:
            raise UsageError(f"limit must be a number of rounds, got {self.limit!r}", fix="pass 1 or more")
