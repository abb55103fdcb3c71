"""`tsopt inspect`: a program before and after the passes, and what they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, cast

from tsopt.cli import process
from tsopt.cli.graph import WRITERS, Graphs
from tsopt.cli.model_sources import load_subject
from tsopt.cli.options import Subject, capture_options
from tsopt.cli.saved import save
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph.drawing import drawing_of
from tsopt.compiler.graph.labels import Labels
from tsopt.compiler.graph.ops import name_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.rewriting.pass_base import Pass
from tsopt.compiler.rewriting.pipeline import PassRecord
from tsopt.compiler.rewriting.rewrite import Rule
from tsopt.passes import STANDARD
from tsopt.runtime.checking.rewrite_checks import Debugged, title
from tsopt.runtime.rendering import (
    PASS_COLUMNS,
    RULE_COLUMNS,
    amount,
    arrow,
    idle_line,
    is_busy,
    pass_cells,
    rule_cells,
)
from tsopt.runtime.report import RuleRecord, pass_json, rule_records, rules_json
from tsopt.transforms import (
    LEVELS,
    check_name,
    debug_passes,
    names_of,
    passes_in,
    rules_of,
    transform_with_records,
)

SHOWN = 3  # places or ops in one line; the JSON has all of them


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be shown: the options of the command."""

    diff: bool
    passes: bool
    only: Sequence[str]
    why: str | None
    graph: Path | None
    debug: bool


@dataclass(frozen=True, slots=True)
class Inspected:
    """A program as captured, in words, and what the passes made of it."""

    captured: str
    optimized: Program
    records: Sequence[PassRecord]
    reasons: list[Why] | None
    debugged: Debugged | None


def inspected(out: Any, subject: Subject, asked: Asked, tell: Callable[[str], None]) -> Inspected:
    """Captures a model, runs the passes, and draws the graph if that is asked for.

    Raises:
        UsageError: a pass or a rule that is asked for does not exist.
    """
    for name in asked.only:
        check_name(name, [item.name for item in passes_in(STANDARD)])
    loaded = load_subject(out, subject)
    tell("capture")
    program = capture(loaded.model, loaded.example_input, **capture_options(subject))
    captured, without = Labels().text(program), subject.without or ()
    options: Any = {"level": subject.level, "without": without, "keep_text": True, "progress": tell}
    debugged = None
    if asked.debug:
        debugged = debug_passes(program, loaded.example_input, seed=subject.seed, **options)
        optimized, records = debugged.program, debugged.records
    else:
        optimized, records = transform_with_records(program, **options)
    reasons = None
    if asked.why is not None:
        check_name(asked.why, [*names_of(STANDARD), *names_in(records)])
        reasons = explain(asked.why, captured, records, subject.level, without)
    if asked.graph is not None:
        tell(f"draw {asked.graph}")
        save(Graphs(program.name, drawing_of(program), drawing_of(optimized)), asked.graph, WRITERS)
        process.State.written += (str(asked.graph),)
    return Inspected(captured, optimized, records, reasons, debugged)


def show(out: Any, found: Inspected, asked: Asked) -> None:
    """What was asked for; the program after each pass if nothing was."""
    shown = [record for record in found.records if not asked.only or record.name in asked.only]
    out.json(to_json(found.captured, found.optimized, shown, found.reasons, found.debugged))
    if found.reasons is not None:
        show_why(out, str(asked.why), found.reasons)
    if asked.passes:
        show_passes(out, shown)
    if found.debugged is not None:
        show_debug(out, found.debugged)
    if found.reasons is None and found.debugged is None and not asked.passes:
        show_texts(out, found.captured, found.records, diff=asked.diff, only=asked.only)


def show_texts(
    out: Any, captured: str, records: Sequence[PassRecord], *, diff: bool, only: Collection[str] = ()
) -> None:
    """The program as captured, then after each pass that changed it; with `diff` only the lines that changed.

    Args:
        only: names of passes; all others are left out.
    """
    if not diff and not only:
        out.say(captured)
    before, shown = captured, 0
    for record in records:
        if not record.changed:
            continue
        if not only or record.name in only:
            shown += 1
            out.say(f"after {record.name}: {record.before.nodes} -> {record.after.nodes} nodes")
            out.say("\n".join(_changes(before, record.text)) if diff else record.text)
        before = record.text
    run = {record.name for record in records}
    for name in [name for name in only if name not in run]:
        out.say(f"{name} was not run")
    if not run:
        out.say("no passes were run")
    elif not shown and not only:
        out.say("no pass changed anything")
    elif not shown and not run.isdisjoint(only):
        out.say(f"{' and '.join(name for name in only if name in run)} changed nothing")


def _changes(before: str, after: str) -> Iterator[str]:
    """The lines that differ, each run of others as one line. Where a value comes from makes no difference."""
    old, new = before.splitlines(), after.splitlines()
    bare = [[line.partition("  # ")[0].rstrip() for line in lines] for lines in (old, new)]
    matcher = SequenceMatcher(None, bare[0], bare[1], autojunk=False)
    for kind, first, last, begin, end in matcher.get_opcodes():
        if kind == "equal":
            count = last - first
            yield f"  ... {count} {'line' if count == 1 else 'lines'} unchanged"
            continue
        yield from (f"- {line}" for line in old[first:last])
        yield from (f"+ {line}" for line in new[begin:end])


# ---- rules --------------------------------------------------------------------------------------------------


def show_rules(out: Any) -> None:
    """A row for each rule of the standard pipeline, and for each pass that has none."""
    found = [
        {"rule": rule.name, "pass": item.name, "numerics": rule.numerics.name, "equation": rule.doc}
        for item in passes_in(STANDARD)
        for rule in cast("Sequence[Rule]", item.rules) or [_as_rule(item)]
    ]
    out.json(found)
    out.table(("rule", "pass", "numerics", "equation"), [tuple(row.values()) for row in found])
    out.say("\n--without RULE leaves one out; tsopt inspect --why RULE shows where it applied")


def _as_rule(item: Pass) -> Rule:
    doc = (type(item).__doc__ or "").strip().splitlines() or [""]
    return Rule(item.name, (), lambda *_: None, item.numerics, doc[0])


# ---- --passes -----------------------------------------------------------------------------------------------


def show_passes(out: Any, records: Sequence[PassRecord]) -> None:
    """A row for each pass with its sizes, then a row for each rule with rewrites or near misses."""
    if not records:
        out.say("no passes were run")
        return
    busy = [record for record in records if is_busy(record)]
    if busy:
        out.table(PASS_COLUMNS, [_counts(cells, r) for cells, r in zip(pass_cells(busy), busy, strict=True)])
    for line in idle_line(records):
        out.say(line.text)
    first, last = records[0].before, records[-1].after
    out.say(
        f"\ntotal: nodes {arrow(first.nodes, last.nodes)}; "
        f"weights {arrow(first.weight_bytes, last.weight_bytes, amount)}; "
        f"peak activation memory {arrow(first.peak_bytes, last.peak_bytes, amount)}; "
        f"{sum(record.seconds for record in records):.2f} s"
    )
    rules = rule_records(records)
    if rules:
        out.say()
        out.table(RULE_COLUMNS, rule_cells(rules))
        out.say("\nuse --why RULE to list the places")


def _counts(cells: tuple[str, ...], record: PassRecord) -> tuple[str, ...]:
    """The row of a pass with counts instead of names; rules have their own rows here."""
    done, nearly = PASS_COLUMNS.index("rewrites"), PASS_COLUMNS.index("near misses")
    counts = {done: str(len(record.done) or "-"), nearly: str(len(record.declined) or "-")}
    return tuple(counts.get(position, cell) for position, cell in enumerate(cells))


# ---- --why --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Why:
    """Where a rule was applied and where it nearly was, with counts by place.

    equation: of the rule; empty for rewrites that are not rules.
    obstacle: why a rule without rewrites and near misses did not match.
    """

    rule: str
    passes: tuple[str, ...]
    equation: str
    done: dict[str, int]
    declined: dict[str, dict[str, int]]
    obstacle: str = ""


def explain(name: str, captured: str, records: Sequence[PassRecord], level: int, without: Sequence[str]) -> list[Why]:
    """One Why for a rule; for a pass, one for each of its rules with rewrites or near misses."""
    rules = rules_of(STANDARD)
    found = [item for item in rule_records(records) if name == item.name or name in item.passes]
    if found or name not in rules:
        return [_why(item, rules[item.name][1].doc if item.name in rules else "") for item in found]
    in_pass, rule = rules[name]
    texts = [captured, *(record.text for record in records)]
    left_out = name in without or in_pass in without
    return [Why(name, (in_pass,), rule.doc, {}, {}, _obstacle(rule, texts, level, left_out))]


def _why(found: RuleRecord, equation: str) -> Why:
    declined = {
        reason: _places(item.where for item in found.declined if item.reason == reason) for reason in found.reasons
    }
    return Why(found.name, found.passes, equation, _places(item.where for item in found.done), declined)


def _places(places: Iterable[str]) -> dict[str, int]:
    return dict(Counter(place or "no source location" for place in places))


def _obstacle(rule: Rule, texts: Sequence[str], level: int, left_out: bool) -> str:
    """Why a rule had no near miss."""
    allowed = LEVELS[level]
    if left_out:
        return "not tried: left out with --without"
    if allowed is None or rule.numerics > allowed:
        return f"not tried: the rule is {rule.numerics.name}, which -O{level} does not allow"
    ends = list(dict.fromkeys(name_of(pattern.root) for pattern in rule.patterns))
    shown = f"{', '.join(ends[:SHOWN])}{' or similar' if len(ends) > SHOWN else ''}"
    count = max(sum(text.count(f" = {end}(") for end in ends) for text in texts)
    if not count:
        return f"no match for the left side of its equation: there are no calls to {shown}"
    calls = f"{_several(count, 'call')} to {shown}"
    return f"no match for the left side of its equation: {calls}, none with matching operands"


def names_in(records: Sequence[PassRecord]) -> list[str]:
    """The names that passes give their rewrites."""
    return [item.name for item in rule_records(records)]


def show_why(out: Any, name: str, found: Sequence[Why]) -> None:
    """The places of each rule: rewrites first, then near misses by reason."""
    if not found:
        out.say(f"{name}: no rewrites, no near misses")
    for number, item in enumerate(found):
        if number:
            out.say()
        _show_rule(out, item)


def _show_rule(out: Any, item: Why) -> None:
    nearly = sum(sum(places.values()) for places in item.declined.values())
    missed = f", {_several(nearly, 'near miss')}" if nearly else ""
    out.say(f"{item.rule}: {_applied(sum(item.done.values()))}{missed}")
    if item.equation:
        out.say(f"  {item.equation}")
    out.say(f"  in {'pass' if len(item.passes) == 1 else 'passes'} {', '.join(item.passes)}")
    if item.obstacle:
        out.say(f"  {item.obstacle}")
    for heading, places in (("applied", item.done), *((f"not applied: {r}", p) for r, p in item.declined.items())):
        if places:
            out.say(f"\n{heading}")
        for place, count in places.items():
            out.say(f"  {place}{f'  x{count}' if count > 1 else ''}")


def _applied(count: int) -> str:
    return {0: "not applied", 1: "applied once"}.get(count, f"applied {count} times")


# ---- --debug-passes -----------------------------------------------------------------------------------------


def show_debug(out: Any, found: Debugged) -> None:
    """What was compared, then each rewrite that changes values, with a rule's other sites as a list of places."""
    trials = " and ".join(found.trials)
    out.say(
        f"compared {_several(found.rewrites, 'rule rewrite')} and the output of {_several(found.passes, 'pass')} "
        f"on the {trials} input{'s' if len(found.trials) > 1 else ''}: "
        + (f"{len(found.findings)} changed values" if found.findings else "no values changed")
    )
    for reason, count in found.not_compared.items():
        out.say(f"  not compared: {_several(count, 'value')}: {reason}")
    for who in dict.fromkeys(map(title, found.findings)):
        first, *more = [item for item in found.findings if title(item) == who]
        out.say(f"\n{who} changes values")
        rows = [
            ("where", first.where),
            ("promise", first.numerics.name),
            ("differs", f"on the {first.trial} input: {first.difference}"),
            ("before", first.before),
            ("after", first.after.replace("\n", f"\n{'':12}")),
            ("fix", f"--without {first.leave_out}"),
            ("also at", ", ".join([item.where or "?" for item in more[:SHOWN]] + ["..."] * (len(more) > SHOWN))),
        ]
        for heading, text in rows:
            if text:
                out.say(f"  {heading + ':':10}{text}")


def _several(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else plural}"


# ---- --json -------------------------------------------------------------------------------------------------


def to_json(
    captured: str,
    optimized: Program,
    records: Sequence[PassRecord],
    why: Sequence[Why] | None,
    debugged: Debugged | None,
) -> dict[str, Any]:
    """Everything requested, as one value."""
    found: dict[str, Any] = {
        "captured": captured,
        "nodes": list(optimized.records(Labels().of(optimized))),
        "passes": [pass_json(record) | {"text": record.text} for record in records],
        "rules": rules_json(rule_records(records)),
    }
    if records:
        before, after = asdict(records[0].before), asdict(records[-1].after)
        found["size"] = {"before": before, "after": after}
    if why is not None:
        found["why"] = [asdict(item) for item in why]
    if debugged is not None:
        found["debug"] = {
            "rewrites": debugged.rewrites,
            "passes": debugged.passes,
            "inputs": list(debugged.trials),
            "not_compared": dict(debugged.not_compared),
            "findings": [asdict(item) | {"numerics": item.numerics.name} for item in debugged.findings],
        }
    return found
