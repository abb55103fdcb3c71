"""Reports as text: tables that fit the width they are given, reasons below the rows they explain. Prints nothing."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsopt.compiler.precision_names import INT4, INT8, INTEGER_VARIANTS
from tsopt.runtime.backends.candidate import precision_in
from tsopt.runtime.checking.verdict import INACCURATE
from tsopt.runtime.layer_table import lines as layer_lines
from tsopt.runtime.untrusted_text import markdown_cell, on_one_line

if TYPE_CHECKING:
    from tsopt.compiler.rewriting.pipeline import PassRecord
    from tsopt.runtime.racing.row import Row
    from tsopt.runtime.report import Report, RuleRecord

COLUMNS = ("candidate", "p50 ms", "p90 ms", "speed-up [95 %]", "verdict", "max diff", "compile s", "first ms")
TIME = "time"
# What is left out first where a table is too wide; --json and markdown always have all of them.
EXPENDABLE = ("first ms", "compile s", "p90 ms", "max diff", TIME)
BAR = 10  # characters of the longest bar
MARK = "* "  # in front of the winner
LONGEST_NAME = 34  # where the whole table is too wide with longer ones
CUT = "..."
PASS_COLUMNS = ("pass", "nodes", "weights", "peak", "rewrites", "near misses", "ms")
RULE_COLUMNS = ("rule", "in", "rewrites", "near misses", "because")
SHOWN = 3  # names in a cell; `tsopt inspect --passes` has a row for each
ITSELF = "calls run the model itself, with the weights it has at the time of the call"
ANOTHER_LIMIT = "metric= and max_drop= (--metric, --max-drop) set another limit for what is not accurate enough"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a report, and the verdict that it is coloured by on a terminal."""

    text: str
    verdict: str = ""


# ---- a race -------------------------------------------------------------------------------------------------


def row_cells(row: Row) -> tuple[str, ...]:
    """A row under COLUMNS."""
    time = row.timing
    difference = "" if row.accuracy is None else f"{row.accuracy.max_difference:.1e}"
    return (
        row.name,
        "-" if time is None else milliseconds(time.p50),
        "-" if time is None else milliseconds(time.p90),
        "1.00x" if row.verdict == "baseline" else "-" if row.speedup is None else str(row.speedup),
        row.verdict,
        difference or "-",
        f"{row.compile_seconds:.1f}" if row.compile_seconds else "-",
        "-" if row.cold is None else milliseconds(row.cold.first),
    )


def ranked(report: Report) -> list[Row]:
    """The winner, then the others by speed, then those that were not timed."""
    timed = sorted((row for row in report.rows if row.timing is not None), key=_median)
    rows = [*timed, *(row for row in report.rows if row.timing is None)]
    return sorted(rows, key=lambda row: row.key != report.winner_key)


def _median(row: Row) -> float:
    return row.timing.p50 if row.timing is not None else 0.0


SHORT_STAGE = 0.05  # seconds: what takes less is not named


def report_lines(report: Report, *, width: int | None = None, bar: str = "#") -> list[Line]:
    """A report for a terminal: the winner first, reasons below the rows they explain, then what the passes did.

    Args:
        width: columns that it may take; None: as many as it needs.
        bar: the character that bars are drawn with.
    """
    return [
        Line(part, line.verdict)
        for line in _report_lines(report, width, bar)
        for part in _wrapped(on_one_line(line.text), width)
    ]


def _report_lines(report: Report, width: int | None, bar: str) -> Iterator[Line]:
    yield Line(f"{report.model}: {report.winner} wins, {report.why}")
    if report.cached:
        yield Line(f"from the cache: {report.cached}; --no-cache races again")
    yield Line("")
    yield from _race_lines(report, width, bar)
    if report.passes:
        yield Line("")
        yield from pass_lines(report.passes, width)
    remarks = list(tail(report))
    if remarks:
        yield Line("")
        yield from map(Line, remarks)


def _race_lines(report: Report, width: int | None, bar: str) -> Iterator[Line]:
    rows = ranked(report)
    slowest = max((_median(row) for row in rows), default=0.0)
    header = (f"{' ' * len(MARK)}{COLUMNS[0]}", *COLUMNS[1:], TIME)
    names = (*COLUMNS, TIME)
    shown = [*range(2), len(COLUMNS), *range(2, len(COLUMNS))] if slowest else list(range(len(COLUMNS)))

    def cells(longest: int | None) -> list[tuple[str, ...]]:
        return [(_marked(report, row, longest), *row_cells(row)[1:], _bar(row, slowest, bar)) for row in rows]

    def fits(table: Sequence[Sequence[str]]) -> bool:
        return width is None or sum(_widths([header, *table], shown)) + 2 * (len(shown) - 1) <= width

    made = cells(None)
    if not fits(made):
        made = cells(LONGEST_NAME)
    for name in EXPENDABLE:
        if fits(made):
            break
        shown = [i for i in shown if names[i] != name]
    table = text_table([header[i] for i in shown], [[row[i] for i in shown] for row in made])
    yield from map(Line, table[:2])
    for row, text in zip(rows, table[2:], strict=True):
        yield Line(text, row.verdict)
        yield from (Line(f"    {said}") for said in said_of(report, row))


def _marked(report: Report, row: Row, longest: int | None) -> str:
    """The name of a row, marked if it wins; a longer one without its middle."""
    name, mark = row.name, MARK if row.key == report.winner_key else " " * len(MARK)
    if longest is not None and len(name) > longest:
        kept = longest - len(CUT)
        name = f"{name[: kept - kept // 2]}{CUT}{name[-(kept // 2) :]}"
    return f"{mark}{name}"


def _bar(row: Row, slowest: float, bar: str) -> str:
    return bar * max(1, round(BAR * _median(row) / slowest)) if row.timing is not None and slowest else ""


def said_of(report: Report, row: Row) -> Iterator[str]:
    """What is to be said of a row: why it is out, what became of parts; how the winner was verified, and its notes."""
    if row.reason:
        yield row.reason
    if row.status == "ok":
        yield from (f"when {loop.when}: {loop.speedup} as fast as eager" for loop in row.loops)
    wins = row.key == report.winner_key
    if wins and row.accuracy is not None:
        yield f"verified: {row.accuracy}"
        yield from (f"not compared: {reason}" for reason in _by_reason(row.accuracy.skipped))
    if wins or row.is_in_parts:
        yield from (f"note: {note}" for note in row.notes)


def _by_reason(skipped: Iterable[str]) -> Iterator[str]:
    """`large: eager raises IndexError` and `tiny: eager raises IndexError` as one."""
    kinds: dict[str, list[str]] = {}
    for kind, _, why in (text.partition(": ") for text in skipped):
        kinds.setdefault(why, []).append(kind)
    yield from (f"{', '.join(names)}: {why}" if why else ", ".join(names) for why, names in kinds.items())


def tail(report: Report, *, stages: bool = True) -> Iterator[str]:
    """Notes besides the race and the passes: sizes, the machine, and with `stages` where the time went."""
    measured = [
        f"op nodes {arrow(*report.nodes)}" if any(report.nodes) else "",
        f"peak activation memory {arrow(*report.peak_bytes, amount)}" if any(report.peak_bytes) else "",
        f"numerics {report.numerics}" if any(report.nodes) else "",
    ]
    if any(measured):
        yield "; ".join(filter(None, measured))
    if stages and report.stages:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.stages if seconds >= SHORT_STAGE)
        yield f"took {sum(seconds for _, seconds in report.stages):.1f} s{f': {parts}' if parts else ''}"
    chosen = precision_in(report.winner_key) in INTEGER_VARIANTS
    if report.quantization and not chosen:
        yield from _why_not_int8(report)
    yield from layer_lines(report.quantization, report.calibration, chosen=chosen)
    if any(row.status == INACCURATE for row in report.rows):
        yield ANOTHER_LIMIT
    if report.sizes:
        yield f"sizes: {report.sizes}"
    if report.frontend:
        yield f"captured {report.frontend}"
    if report.not_isolated_because:
        yield f"candidates ran in this process: {report.not_isolated_because}"
    for signature, outcome in report.signatures:
        yield f"call with a new signature ({signature}): {outcome}"
    if report.is_eager:
        yield ITSELF
    for text in report.audits:
        yield f"since then: {text}"
    for kind, path in report.files:
        yield f"{kind}: {path}"
    yield f"on {report.environment}"


def _why_not_int8(report: Report) -> Iterator[str]:
    """Why the best candidate in integers did not win."""
    rows = [row for row in report.rows if precision_in(row.key) in INTEGER_VARIANTS]
    if not rows:
        return
    best = min((row for row in rows if row.timing is not None), key=_median, default=rows[-1])
    winning = report.winning
    took, least = milliseconds(_median(best)), milliseconds(_median(winning))
    name = INT4 if precision_in(best.key) == INT4 else INT8
    if best.status != "ok" or best.timing is None:  # times of one that is out, even if it was timed, decide nothing
        yield f"{name} was not chosen: {best.name}: {best.reason or best.verdict}"
    elif winning.timing is not None and _median(best) > _median(winning) and took != least:
        yield f"{name} was not chosen: {best.name} takes {took} ms, {report.winner} {least} ms"
    else:
        yield f"{name} was not chosen: {best.name}: {best.reason or f'no faster than {report.winner} within noise'}"


# ---- passes -------------------------------------------------------------------------------------------------


def pass_lines(records: Sequence[PassRecord], width: int | None = None) -> Iterator[Line]:
    """A row for each pass that did something or nearly did, what it did below; the others in one line."""
    busy = [record for record in records if is_busy(record)]
    rows = [(cells[0], *cells[1:4], cells[6]) for cells in pass_cells(busy)]
    header, *table = text_table((*PASS_COLUMNS[:4], "ms"), rows)
    if busy:
        yield from map(Line, (header, table[0]))
    for record, text in zip(busy, table[1:], strict=True):
        yield Line(text, "failed" if record.failed else "")
        if record.failed:
            yield Line(f"    {record.left_out}")
        for what, rules in (("rewrites", record.done), ("near misses", record.declined)):
            if rules:
                yield Line(f"    {what}: {_counted(item.rule for item in rules)}")
    yield from idle_line(records)


def idle_line(records: Sequence[PassRecord]) -> Iterator[Line]:
    """The passes that found nothing to do, in whatever round."""
    names = dict.fromkeys(record.name for record in records)
    idle = [name for name in names if not any(is_busy(record) for record in records if record.name == name)]
    if idle:
        yield Line(f"{len(idle)} {'pass' if len(idle) == 1 else 'passes'} found nothing to do: {', '.join(idle)}")


def is_busy(record: PassRecord) -> bool:
    """Whether a pass changed something, nearly did, or failed."""
    return bool(record.changed or record.declined or record.failed)


def pass_cells(records: Sequence[PassRecord]) -> list[tuple[str, ...]]:
    """One row for each pass under PASS_COLUMNS."""
    return [
        (
            record.name,
            arrow(record.before.nodes, record.after.nodes),
            arrow(record.before.weight_bytes, record.after.weight_bytes, amount),
            arrow(record.before.peak_bytes, record.after.peak_bytes, amount),
            f"{record.rule} left out".strip() if record.failed else _counted(done.rule for done in record.done) or "-",
            _counted(declined.rule for declined in record.declined) or "-",
            f"{record.seconds * 1e3:.0f}",
        )
        for record in records
    ]


def rule_cells(rules: Sequence[RuleRecord]) -> list[tuple[str, ...]]:
    """Rows under RULE_COLUMNS: one for each rule, and one more for each further reason."""
    rows: list[tuple[str, ...]] = []
    for rule in rules:
        (reason, count), *more = rule.reasons.items() or [("", 0)]
        rows.append((rule.name, ", ".join(rule.passes), str(len(rule.done) or "-"), str(count or "-"), reason))
        rows += [("", "", "", str(count), reason) for reason, count in more]
    return rows


def _counted(names: Iterable[str]) -> str:
    """The most frequent names with their counts."""
    counts = Counter(names).most_common()
    shown = [f"{name} x{count}" if count > 1 else name for name, count in counts[:SHOWN]]
    return ", ".join([*shown, f"{len(counts) - SHOWN} more"] if len(counts) > SHOWN else shown)


# ---- tables and numbers -------------------------------------------------------------------------------------


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [[on_one_line(cell) for cell in row] for row in [header, *rows]]
    widths = _widths(table, range(len(header)))
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _widths(rows: Sequence[Sequence[str]], columns: Iterable[int]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in columns]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(map(markdown_cell, cells))} |" for cells in [header, ["---"] * len(header), *rows]]


def markdown_blocks(*blocks: Sequence[str]) -> str:
    """Blocks of lines with a blank line between them: what follows a table or a list without one is part of it."""
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _wrapped(text: str, width: int | None) -> list[str]:
    """A line in pieces of a width; what follows the first is indented further."""
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def arrow(before: int, after: int, text: Callable[[int], str] = str) -> str:
    """`before -> after`, or one of them where they are the same."""
    return text(before) if text(before) == text(after) else f"{text(before)} -> {text(after)}"


def amount(count: int) -> str:
    """A number of bytes: `512 B`, `1.5 kB`, `44.6 MB`."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if round(size, 1) < 1000:  # as it is written
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """Three digits, or all of a larger whole number: `1.5`, `0.0123`, `1,234`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
