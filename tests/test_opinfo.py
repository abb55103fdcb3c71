"""torch's own database of ops against the whole path: capture, passes, compile, call.

Every op is a model twice: its tensors as inputs, and its tensors as weights, where all that it computes is constant.
A slice of the database is part of every run. TSOPT_OPINFO chooses another (`3/20`, `all`, a part of a name), and
TSOPT_FUZZ=1 takes all of it. What cannot work is in opinfo_failures.txt with its reason; that list may only shrink.
"""

from __future__ import annotations

import itertools
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.serialize import read_program, write_program
from tsopt.runtime.checking.compare import compare
from tsopt.runtime.checking.reference64 import Reference64

FAILURES = Path(__file__).with_name("opinfo_failures.txt")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
SLICES = 40
SAMPLES = 4  # for each op, spread over the first LOOKED_AT of its samples
LOOKED_AT = 24
MOST_FAILURES = 49  # may be lowered
ENOUGH = 8  # elements that two draws cannot agree on by accident


def op_database() -> list[Any]:
    """The ops that run here. NOTE: the import is slow, so nobody pays for it who does not run this file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if dtype_of(op) is not None]


def not_seeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's `wrapper_set_seed`: the database seeds its random ops in the middle of the call."""
    return op(*args, **kwargs)


def dtype_of(op: Any) -> torch.dtype | None:
    """float32, or what the op takes instead; None where it runs on no CPU."""
    wanted = (torch.float32, torch.int64, torch.bool, torch.complex64)
    return next((dtype for dtype in wanted if dtype in op.supported_dtypes("cpu")), None)


def chosen_slices() -> list[str]:
    """One case for each; all of the database comes in slices, so that several processes can share it."""
    if wanted := os.environ.get("TSOPT_OPINFO"):
        return [wanted]
    return [f"{index}/{SLICES}" for index in range(SLICES if os.environ.get("TSOPT_FUZZ") else 1)]


def in_slice(name: str, chosen: str) -> bool:
    if chosen == "all":
        return True
    if "/" not in chosen:
        return chosen in name
    index, count = map(int, chosen.split("/"))
    return zlib.crc32(name.encode()) % count == index


def samples_of(op: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype_of(op)), LOOKED_AT))
    return iter(found[:: max(1, len(found) // SAMPLES)][:SAMPLES])


@dataclass(frozen=True)
class Case:
    """One call of an op: where its tensors go, and the call on given tensors."""

    op: Any
    tensors: list[torch.Tensor]
    structure: Any

    @classmethod
    def of(cls, op: Any, sample: Any) -> Case:
        tensors, structure = flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        return cls(op, [t.detach() for t in tensors], structure)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        first, args, kwargs = unflatten(self.structure, list(tensors))
        return self.op(first, *args, **kwargs)


class OnInputs(nn.Module):
    """The op on the inputs of the model."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.eval()

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.case.run(tensors)


class OnWeights(nn.Module):
    """The op on buffers of the model, and an input so that there is one."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for i, tensor in enumerate(case.tensors):
            self.register_buffer(f"t{i}", tensor)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, self.case.run([getattr(self, f"t{i}") for i in range(len(self.case.tensors))])


def fresh(case: Case, kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and its inputs that nobody has written to yet."""
    tensors = [t.clone() for t in case.tensors]
    if kind == "inputs":
        return OnInputs(case), tuple(tensors)
    return OnWeights(Case(case.op, tensors, case.structure)), (torch.ones(2),)


class Wrong(AssertionError):
    """The program does not do what the op does."""


def attack(case: Case, kind: str, folder: Path) -> None:
    """Raises Wrong, or what the path from the model to the executable raises."""
    model, inputs = fresh(case, kind)
    try:
        torch.manual_seed(0)
        wanted = flatten(model(*inputs))[0]
    except Exception:
        return  # eager itself refuses this sample
    subject, given = fresh(case, kind)
    captured = tsopt.capture(subject, given, allow_nan=True)
    program = tsopt.transform(captured)
    same_when_stored(captured, folder)
    executable = tsopt.compile(program, "eager")
    torch.manual_seed(0)
    found = flatten(executable(*given))[0]
    if new := shared(found, (*given, *subject.buffers())) - shared(wanted, (*inputs, *model.buffers())):
        raise Wrong(f"outputs share memory that eager does not share: {sorted(new)}")
    drawn = [node for node in captured.calls() if ops.is_random(node)]
    if drawn:
        kept = [tensor.clone() for tensor in found]  # a result may be a buffer, which the next call writes to
        check_random(case, kind, drawn, executable, kept, wanted)
        return
    truths = truth(captured, fresh(case, kind)[1])
    written = zip((*given, *subject.buffers()), (*inputs, *model.buffers()), strict=True)
    for mine, theirs in (*zip(found, wanted, strict=True), *written):
        value = truths.pop(0) if truths else None
        exact = program.numerics == Numerics.EXACT
        verdict = compare(plain(mine), plain(theirs), exact=exact, reference64=lambda value=value: value)
        if not verdict.ok:
            raise Wrong(verdict.reason)


def shared(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    """Which outputs share memory with which of the given tensors, or with which output before them."""
    places = [t.untyped_storage().data_ptr() for t in (*given, *outputs)]
    pairs = itertools.combinations(range(len(places)), 2)
    return {(i, j) for i, j in pairs if j >= len(given) and places[i] == places[j] != 0}


def truth(captured: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The outputs in float64, as far as there are any."""
    values = Reference64(captured).run(inputs)
    nodes = captured.outputs[len(captured.signature.writes) :]
    return [None if values is None else values[node] for node in nodes]


def same_when_stored(program: Program, folder: Path) -> None:
    write_program(program, folder)
    made = read_program(folder, list(program.state.values()), own=True)  # which ops a file may call is another matter
    if made.fingerprint(contents=True) != program.fingerprint(contents=True):
        raise Wrong("another program after it was stored")


def check_random(
    case: Case, kind: str, drawn: list[Any], executable: Any, first: list[torch.Tensor], wanted: list[torch.Tensor]
) -> None:
    """Types are kept, and two calls differ where those of eager do."""
    model, inputs = fresh(case, kind)
    torch.manual_seed(1)
    again = flatten(model(*inputs))[0]
    inputs = fresh(case, kind)[1]
    torch.manual_seed(1)
    second = flatten(executable(*inputs))[0]
    for mine, theirs in zip(first, wanted, strict=True):
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            raise Wrong(f"{mine.dtype}{list(mine.shape)} instead of {theirs.dtype}{list(theirs.shape)}")
    if any(node.target._schema.name in ops.UNINITIALIZED for node in drawn):
        return
    large = any(t.numel() >= ENOUGH for t in wanted)
    if large and differ(wanted, again) and not differ(first, second):
        raise Wrong("it was random and is no more")


def differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return any(not compare(plain(a), plain(b)).ok for a, b in zip(first, second, strict=True))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


def outcome(op: Any, kind: str, folder: Path) -> str:
    """What goes wrong first, in one line; empty when all is well."""
    for sample in samples_of(op):
        try:
            attack(Case.of(op, sample), kind, folder)
        except Exception as error:  # whatever it is, it is the finding
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def expected() -> dict[tuple[str, str], str]:
    """(op, kind) -> how the outcome begins."""
    found = {}
    for line in FAILURES.read_text().splitlines():
        if line and not line.startswith("#"):
            op, kinds, begins = (part.strip() for part in line.split("|"))
            found |= {(op, kind): begins for kind in kinds.split()}
    return found


@pytest.fixture
def database(monkeypatch):
    found = op_database()
    from torch.testing._internal import common_methods_invocations

    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", not_seeded)
    return found


@pytest.mark.sliced(1)
@pytest.mark.parametrize("kind", ["inputs", "weights"])
@pytest.mark.parametrize("chosen", chosen_slices())
@pytest.mark.filterwarnings("ignore")
def test_every_op_of_torch_is_what_it_is_in_eager(kind, chosen, database, tmp_path):
    known, surprises = expected(), []
    for op in database:
        if not in_slice(op.full_name, chosen):
            continue
        found, begins = outcome(op, kind, tmp_path), known.get((op.full_name, kind), "")
        if bool(found) != bool(begins) or not found.startswith(begins):
            surprises.append(f"{op.full_name} | {kind} | {found or 'works: take it off the list'}")
    assert not surprises, "\n".join(["", *surprises])


def test_the_list_of_failures_is_about_ops_that_exist_and_does_not_grow(database):
    names = {op.full_name for op in database}
    if f"torch=={torch.__version__.partition('+')[0]}" in CONSTRAINTS.read_text():
        assert {name for name, _ in expected()} <= names, "the list is of the version that is tested"
    assert len(expected()) <= MOST_FAILURES
    assert all(begins and kind in ("inputs", "weights") for (_, kind), begins in expected().items())
