"""Chooses among the timed contenders: the fastest one that is still correct on fresh inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tsopt.errors import UsageError
from tsopt.runtime.backends.candidate import ONE_THREAD, Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import FIRST, LIMITS, MADE_UP, is_exact
from tsopt.runtime.checking.judge import Judge
from tsopt.runtime.checking.verdict import Verdict
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.contenders import Contender, Maker, Progress
from tsopt.runtime.racing.row import MODEL, Loop, Row, geometric_mean
from tsopt.runtime.racing.speedup import UNDECIDED, by_worst, ratio, speedup
from tsopt.runtime.sandbox.isolated import Isolated

EQUAL = 1.03  # times as fast as another: no more than that is between candidates of which the simpler one is chosen


@dataclass(frozen=True)
class Race:
    """The outcome: a row for each candidate, and the winner's executable (None: eager).

    winner: the key of its row.
    candidate: the winner; None: eager.
    not_isolated_because: why candidates ran in the caller's process, where each was meant to have one of its own.
    interrupted: whether the timing ended early, because the caller wanted the best candidate until then.
    cached: when the rows were measured, where that was not now, and what was checked since.
    files: what the winner was compiled to, where that is to be kept.
    """

    rows: tuple[Row, ...]
    winner: str
    why: str
    executable: Executable | None
    candidate: Candidate | None = None
    not_isolated_because: str = ""
    interrupted: bool = False
    cached: str = ""
    files: bytes | None = None

    @property
    def row(self) -> Row:
        """The winner's."""
        return next(row for row in self.rows if row.key == self.winner)


def choose(
    maker: Maker,
    rows: list[Row],
    contenders: Mapping[str, Contender],
    fresh: Callable[[bool], Judge],
    streak: Callable[[Executable], str],
    progress: Progress,
    *,
    takes_long: bool = False,
) -> Race:
    """The fastest candidate that is right once more, as it was timed and as it is in this process; eager otherwise.

    Args:
        fresh: a judge with inputs that the race did not use; only a few of them if it is given True.
        streak: what goes wrong in many calls in a row; empty when nothing does.
        takes_long: before the rounds, candidates were judged on a single call.
    """
    judges: dict[bool, Judge] = {}
    candidates = {candidate.key: candidate for candidate in maker.settings.candidates}
    faster = faster_first(rows)
    order = _simpler_first(faster, candidates)
    for row in order:
        progress(f"verify {row.name}")
        candidate, contender = candidates[row.key], contenders[row.key]
        # What is here, or is opened from its files, has been checked; what is compiled once more is another executable.
        few = (isinstance(contender, Executable) or maker.reopens(contender, candidate)) and not takes_long
        if few not in judges:
            judges[few] = fresh(few)
        try:
            others = [item for item in contenders.values() if item is not contender]
            there = MADE_UP if takes_long else FIRST
            has_bits = is_exact(maker.program(candidate), candidate) and outcomes.NOT_BIT_EQUAL not in row.notes
            exact = takes_long and has_bits
            executable, verdict = _verified(row, candidate, contender, maker, judges[few], others, there, exact=exact)
            status, failure = verdict.status, verdict.reason
            if verdict.ok:
                status, failure = "wrong", streak(executable)
        except UsageError:  # the user's metric failed, not the candidate
            raise
        except Exception as error:  # whatever it raises, it is out
            ending = outcomes.ending_of(error)
            status = ending if ending in outcomes.LOST else "wrong"
            failure = outcomes.said_by(error)
        if not failure:
            why = f"{row.speedup} as fast as eager"
            why += "".join(f", {loop.speedup} when {loop.when}" for loop in row.loops)
            why += _level_with(row, faster, candidates) + _why_not_the_largest_gain(row, faster)
            chosen = replace(row, notes=executable.notes, accuracy=_wider(row.accuracy, verdict))
            rows = [chosen if r is row else r for r in rows]
            return Race(tuple(rows), row.key, why, executable, candidate, files=maker.files.get(row.key))
        rows = [replace(r, status=status, reason=f"after timing: {failure}") if r is row else r for r in rows]
    return Race(tuple(rows), MODEL, _why_eager(rows), None)


def faster_first(rows: Sequence[Row]) -> list[Row]:
    """The rows that are faster than eager, the fastest first."""
    found = {row.key: row for row in rows if row.is_faster and row.timing is not None}
    return [found[key] for key in by_worst(list(found), lambda key, other: _times_slower(found[other], found[key]))]


def _level_with(chosen: Row, faster: Sequence[Row], candidates: Mapping[str, Candidate]) -> str:
    """Who was as fast as the winner, as far as noise lets that be known."""
    level = [row for row in faster if row is not chosen and not _is_slower(row, chosen)]
    if not level:
        return ""
    names = " and ".join((", ".join(row.name for row in level[:-1]), level[-1].name)[len(level) == 1 :])
    are = "are" if len(level) > 1 else "is"
    code = all(candidates[row.key].info.code for row in level) and not candidates[chosen.key].info.code
    files = "their files" if len(level) > 1 else "its file"
    return f"; {names} {are} equally fast within noise" + (f", but {files} would contain code" if code else "")


def _why_not_the_largest_gain(chosen: Row, faster: Sequence[Row]) -> str:
    """How the winner compares with one that gained more over eager.

    Either that one is slower with new sizes, or it left in rounds in which eager was slow.
    """
    larger = max(faster, key=_repeated_gain)
    if _repeated_gain(larger) <= _repeated_gain(chosen) or not _is_slower(larger, chosen):
        return ""
    assert larger.timing is not None
    assert chosen.timing is not None
    slower = [loop for loop, times in _told_apart(larger, chosen) if times > 1]
    if slower:
        when = " and ".join(f"when {loop.when} ({loop.speedup})" for loop in slower)
        return f"; {larger.name} is faster where the same calls repeat, but not {when}"
    times = ratio(chosen.timing, larger.timing)
    return f"; {larger.name} gained more when eager was slow, but takes {times:.2f} times as long in the same rounds"


def _repeated_gain(row: Row) -> float:
    return row.speedup.ratio if row.speedup is not None else 0.0


def _verified(
    row: Row,
    candidate: Candidate,
    contender: Contender,
    maker: Maker,
    judge: Judge,
    others: Sequence[Contender],
    there: str,
    *,
    exact: bool,
) -> tuple[Executable, Verdict]:
    """The contender in this process, and whether it is right.

    Args:
        there: the part of the input sets that the one that was timed is judged on, in its own process.
        exact: it should have eager's bits, which has been seen on the example only.
    """
    timed = None
    if isinstance(contender, Isolated) and not contender.retired:
        # The one that was timed first: state that the timing has corrupted shows there, and it crashes there.
        timed = judge.judge(contender, precision=candidate.precision, part=there)
    if timed is None or timed.ok:
        maker.make_room(others)
    executable = maker.here(contender, candidate)
    if timed is not None and not timed.ok:
        return executable, timed
    verdict = judge.judge(executable, precision=candidate.precision, exact=exact)
    if not verdict.ok and exact:
        verdict = judge.judge(executable, precision=candidate.precision)
        executable.notes += (outcomes.NOT_BIT_EQUAL,)
    if judge.criterion is not None and candidate.precision in LIMITS and verdict.ok:
        executable.tolerance = judge.criterion.tolerance(executable)
    executable.notes = tuple(dict.fromkeys((*executable.notes, *row.notes, *verdict.notes)))
    return executable, verdict


def _wider(before: Verdict | None, last: Verdict) -> Verdict:
    """The verdict by more input sets."""
    return last if before is None or len(before.inputs) < len(last.inputs) else before


def _why_eager(rows: Sequence[Row]) -> str:
    """Why eager won."""
    late = " within the time limit" if any(row.status == "timed out" for row in rows) else ""
    reason = outcomes.stopped(tuple(rows))
    if reason:
        return f"no candidate could be tried{late}: {reason}"
    usable = ("ok", outcomes.SLOWER, outcomes.NOT_CHECKED, outcomes.NOT_TIMED)
    if not any(row.key != MODEL and row.status in usable for row in rows):
        return f"no candidate could be used{late}"
    open_ones = [row.name for row in rows if row.verdict == UNDECIDED]
    return "no candidate is significantly faster" + (f"; undecided: {', '.join(open_ones)}" if open_ones else "")


def _simpler_first(ranked: Sequence[Row], candidates: Mapping[str, Candidate]) -> list[Row]:
    """Data before code, and one thread before several, where that costs next to nothing.

    The first where noise cannot tell the two apart. The second also where it can: what two threads gain, 3 % or less,
    is lost as soon as they take a little longer to meet, and the other cores are free for what else the machine does.
    """
    found = list(ranked)
    if found and candidates[found[0].key].info.code:
        found = _with_first(
            found, found[0], lambda row: not candidates[row.key].info.code and not _is_slower(row, found[0])
        )
    if found:
        one_thread = replace(candidates[found[0].key], options=ONE_THREAD)
        found = _with_first(found, ranked[0], lambda row: candidates[row.key] == one_thread)
    return found


def _with_first(ranked: list[Row], fastest: Row, is_preferred: Callable[[Row], bool]) -> list[Row]:
    """The rows, with the best of the preferred ones first if the fastest of all is hardly faster."""
    for row in ranked[1:]:
        if is_preferred(row) and _times_slower(row, fastest) <= EQUAL:
            return [row, *(other for other in ranked if other is not row)]
    return ranked


def _times_slower(row: Row, best: Row) -> float:
    """How many times, in the rounds that they share and in the loops that tell them apart: the geometric mean."""
    assert row.timing is not None
    assert best.timing is not None
    return geometric_mean([ratio(best.timing, row.timing), *(times for _, times in _told_apart(row, best))])


def _told_apart(row: Row, best: Row) -> list[tuple[Loop, float]]:
    """The loops of a row in which it is faster or slower than the best one, and that is not noise; how many times."""
    of_best = {loop.when: loop.timing for loop in best.loops}
    shared = [(loop, speedup(of_best[loop.when], loop.timing)) for loop in row.loops if loop.when in of_best]
    return [(loop, found.ratio) for loop, found in shared if found.verdict in ("faster", "slower")]


def _is_slower(row: Row, best: Row) -> bool:
    """Whether it is slower than the best one, and that is not noise."""
    assert row.timing is not None
    assert best.timing is not None
    if _told_apart(row, best):
        return _times_slower(row, best) > 1
    return speedup(best.timing, row.timing).verdict == "faster"
