"""What a rewrite must keep, checked in one call: text, invariants, numbers, and that a second run does nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.example import as_example
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph.ops import aten, is_call, name_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.verify import output_aliases, verify_program
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass, Repeat
from tsopt.compiler.rewriting.pipeline import PassRecord, run
from tsopt.compiler.rewriting.rewrite import Rule, RulePass

SPECIAL = (
    float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45, -1e-45, 1e-39, 1.17549435e-38,
    3.4e38, -3.4e38, 1.0, -1.0, 0.5, -2.0, 2.5, 16777217.0, 1e-20,
)  # fmt: skip


def specials(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that holds every value that rewrites get wrong, as far as the shape goes."""
    count = torch.Size(shape).numel()
    values = torch.tensor(SPECIAL, dtype=torch.float64)
    return values.repeat(count // len(SPECIAL) + 1)[:count].reshape(shape).to(dtype)


def of_any_dtype(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Specials, or for dtypes that have none, small numbers."""
    return specials(*shape, dtype=dtype) if dtype.is_floating_point else torch.randint(0, 9, shape).to(dtype)


def ops_of(program: Program) -> list[str]:
    """The calls in order, without `aten.`: `["linear", "relu"]`."""
    return [name_of(node).removeprefix("aten.") for node in program.calls()]


def call(program: Program, *args: Any, **kwargs: Any) -> Any:
    """Runs a program as the model was called; writes to state are left out."""
    flat = program.signature.bind(args, kwargs)
    flat += [program.state[item.name] for item in program.signature.state_inputs]
    with torch.no_grad():
        values = program.module()(*flat)
    return program.signature.unbind(values[len(program.signature.writes) :], args, kwargs)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The comparison of class E: dtype, shape, places of NaN, signs of zero, bits. The payload of NaN is ignored."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    found, wanted = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (found, wanted))
    if found.is_complex():
        found, wanted = torch.view_as_real(found), torch.view_as_real(wanted)
    if found.is_floating_point():
        assert torch.equal(found.isnan(), wanted.isnan()), f"NaN in other places: {found} {wanted}"
        found, wanted = found.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0)  # keeps the sign of zero
        assert torch.equal(found.signbit(), wanted.signbit()), f"other signs: {found} {wanted}"
    assert torch.equal(found, wanted), f"{found} {wanted}"


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The comparison of class R, element by element."""
    loose = {torch.float16: (1e-2, 1e-3), torch.bfloat16: (3e-2, 1e-2), torch.float64: (1e-7, 1e-7)}
    rtol, atol = loose.get(wanted.dtype, (1e-4, 1e-5))
    if not wanted.is_floating_point() and not wanted.is_complex():
        rtol = atol = 0
    finite = wanted[wanted.isfinite()].double().abs() if wanted.is_floating_point() else wanted.new_zeros(0).double()
    atol *= max(1.0, float(finite.square().mean().sqrt()) if finite.numel() else 1.0)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


def eager(model: Callable[..., Any], example: Any) -> list[torch.Tensor]:
    """What the model returns, flat, on clones of the example."""
    return _on_clones(copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model, example)[0]


def _on_clones(function: Callable[..., Any], example: Any) -> tuple[list[torch.Tensor], set[tuple[int, int]]]:
    """Flat results, and which of them share memory with which input or with an earlier result."""
    made = as_example(example)
    leaves, structure = flatten((made.args, made.kwargs))
    inputs = [leaf.detach().clone(memory_format=torch.preserve_format) for leaf in leaves]
    args, kwargs = unflatten(structure, inputs)
    with torch.no_grad():
        values = flatten(function(*args, **kwargs))[0]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*inputs, *values)]
    shared = {
        (i, j) for i in range(len(inputs), len(places)) for j in range(i) if places[i] == places[j] and places[i] != 0
    }
    return values, shared


def assert_computes(program: Program, model: Callable[..., Any], examples: Iterable[Any], *, exact: bool) -> None:
    """The program returns what the model returns on each example, and shares no memory that the model does not."""
    for item in examples:
        found, shared = _on_clones(lambda *args, **kwargs: call(program, *args, **kwargs), item)
        model_copy = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
        wanted, allowed = _on_clones(model_copy, item)
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            (assert_same_bits if exact else assert_close)(mine, theirs)
        assert shared <= allowed, f"memory shared that eager does not share: {sorted(shared - allowed)}"


@dataclass(frozen=True)
class Outcome:
    """The programs before and after, and what was said about it."""

    before: Program
    after: Program
    records: list[PassRecord]

    @property
    def ops(self) -> list[str]:
        return ops_of(self.after)

    @property
    def done(self) -> set[str]:
        return {done.rule for record in self.records for done in record.done}

    @property
    def declined(self) -> set[tuple[str, str]]:
        return {(item.rule, item.reason) for record in self.records for item in record.declined}

    @property
    def reasons(self) -> set[str]:
        return {reason for _, reason in self.declined}


def passes_of(what: Rule | Pass | Repeat | Sequence[Any]) -> tuple[Pass | Repeat, ...]:
    if isinstance(what, Rule):
        return (RulePass(what.name, (what,)),)
    return tuple(what) if isinstance(what, (tuple, list)) else (what,)


def check(
    what: Rule | Pass | Repeat | Sequence[Any],
    model: Callable[..., Any],
    example: Any,
    ops: Sequence[str] | None = None,
    *,
    also: Sequence[Any] = (),
    exact: bool | None = None,
    level: Numerics = Numerics.ROUNDING,
) -> Outcome:
    """Captures a model, rewrites it and checks the four facts.

    Args:
        what: a rule, a pass, or several.
        ops: the calls afterwards, when given.
        also: more examples to compare numbers on (special values, say).
        exact: whether bits must be equal; by default what the program says of itself.
    """
    passes = passes_of(what)
    before = capture(model, example)
    text = before.text
    after, records = run(before, passes, Limits(level))
    if ops is not None:
        assert ops_of(after) == list(ops)
    assert before.text == text, "the pass has edited the program it was given"
    verify_program(after, aliases=output_aliases(before))
    is_exact = after.numerics == Numerics.EXACT if exact is None else exact
    assert_computes(after, model, [example, *also], exact=is_exact)
    again, second = run(after, passes, Limits(level))
    assert again.text == after.text
    assert not any(record.done for record in second)
    return Outcome(before, after, records)


def check_fires(what: Rule, model: Callable[..., Any], example: Any, **options: Any) -> Outcome:
    """The rule is applied, and the four facts hold."""
    found = check(what, model, example, **options)
    assert found.done == {what.name}, found.before.text
    return found


def check_declines(
    what: Rule, model: Callable[..., Any], example: Any, reason: str | None = None, **options: Any
) -> Outcome:
    """The rule is not applied; with a reason, the ledger says why."""
    found = check(what, model, example, **options)
    assert found.done == set(), found.after.text
    assert found.ops == ops_of(found.before)
    if reason is not None:
        assert (what.name, reason) in found.declined, found.declined
    return found


@dataclass(frozen=True)
class Edit(Pass):
    """A pass made of a function: for mistakes that the pipeline must catch."""

    edit: Callable[[Program], Any]
    name: str = "faulty"
    says: bool = True
    numerics: Numerics = Numerics.EXACT

    def run(self, program: Program, limits: Limits) -> Changes:
        self.edit(program)
        return Changes((Done(self.name, "here"),) if self.says else (), numerics=self.numerics)


def find(program: Program, name: str) -> fx.Node:
    """The first call of an op."""
    return next(node for node in program.graph.nodes if is_call(node) and name_of(node).removeprefix("aten.") == name)


__all__ = [
    "Edit",
    "Limits",
    "Numerics",
    "Outcome",
    "RulePass",
    "assert_close",
    "assert_computes",
    "assert_same_bits",
    "aten",
    "call",
    "capture",
    "check",
    "check_declines",
    "check_fires",
    "eager",
    "find",
    "ops_of",
    "passes_of",
    "run",
    "specials",
]
