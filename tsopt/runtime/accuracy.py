"""Does a candidate compute what the model computes? Verdicts by class, against eager and against float64.

The tests and their numbers: PyTorch's `assert_close` defaults for one op, TorchDynamo's float64 criterion
(RMSE no more than twice eager's own distance from float64) for whole graphs, with a bound on the largest
error added, because an RMSE hides one bad element in a million.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler import ops
from tsopt.compiler.capture import user_frame
from tsopt.compiler.example import Example, as_example
from tsopt.compiler.program import Numerics, Program
from tsopt.compiler.protect import protected
from tsopt.compiler.structure import Structure, flatten
from tsopt.errors import AccuracyError, BackendError
from tsopt.runtime.inputs import SPECIAL, InputSet, input_sets

# whole-graph tolerances by dtype: rtol and atol of the element test, tol of the float64 test
TOLERANCES: dict[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-7, 1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5, 1e-4),
    torch.float16: (1e-2, 1e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2, 1e-2),
    torch.complex128: (1e-7, 1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5, 1e-4),
}
FEW = 1000  # elements: below, an RMSE says little and gets the wider factor


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor against its reference. `test` is the one that decided: bits, element, float64, decision."""

    ok: bool
    test: str
    max_difference: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """All outputs on all input sets.

    max_difference: the largest |candidate - eager| over finite values, on inputs of ordinary size.
    test: the weakest test that was needed: bits < element < float64 < decision.
    inputs: the input sets compared; `skipped` those that eager itself refuses or answers with no finite value.
    """

    ok: bool
    test: str
    max_difference: float
    inputs: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if not self.ok:
            return f"wrong: {self.reason}"
        how = {
            "bits": "bit-equal",
            "element": "equal within rounding",
            "float64": "as close to float64 as eager",
            "decision": "equal but for ties within rounding",
        }[self.test]
        return f"{how} on {len(self.inputs)} input sets, max difference {self.max_difference:.2e}"


ORDER = ("bits", "element", "float64", "decision")


def compare(
    result: torch.Tensor,
    reference: torch.Tensor,
    *,
    exact: bool = False,
    reference64: Callable[[], torch.Tensor | None] | None = None,
) -> Comparison:
    """Compares two tensors.

    Args:
        exact: the values must be equal to the bit (the sign of zero, the places of NaN; not NaN's payload).
        reference64: gives the float64 value, when the element test has failed.
    """
    kind = _kind(result, reference)
    if kind:
        return Comparison(False, "type", reason=kind)
    if _bit_equal(result, reference):
        return Comparison(True, "bits")
    difference = _max_difference(result, reference)
    if exact:
        return Comparison(False, "bits", difference, f"not bit-equal, max difference {difference:.3g}")
    if reference.dtype not in TOLERANCES:
        count = int((result != reference).sum())
        return Comparison(
            False, "element", difference, f"{count} of {reference.numel()} {reference.dtype} values differ"
        )
    if reference.is_complex():
        result, reference = torch.view_as_real(result), torch.view_as_real(reference)
    places = _special_places(result, reference)
    if places:
        return Comparison(False, "element", difference, places)
    rtol, atol, tol = TOLERANCES[reference.dtype]
    # A copy in float64: differences of float16 values and squares of large float32 values overflow.
    res, ref = _finite(result), _finite(reference)
    # The size of the output sets the absolute tolerance: 1e-5 would hide all of an output around 1e-8.
    scale = float(ref.square().mean().sqrt()) or 1.0
    excess = (res - ref).abs() - (atol * scale + rtol * ref.abs())
    if float(excess.max()) <= 0:
        return Comparison(True, "element", difference)
    bad = int((excess > 0).sum())
    failed = (
        f"{bad} of {ref.numel()} values beyond rtol {rtol:g}, atol {atol * scale:.3g}; max difference {difference:.3g}"
    )
    truth = reference64() if reference64 is not None and reference.dtype != torch.float64 else None
    if truth is None:
        missing = "" if reference64 is None else "; no float64 reference could be computed to decide"
        return Comparison(False, "element", difference, failed + missing)
    if truth.is_complex():
        truth = torch.view_as_real(truth)
    return _float64_test(res, ref, truth, atol * scale, tol * scale, difference, failed, reference.dtype)


def _float64_test(
    res: torch.Tensor,
    ref: torch.Tensor,
    truth: torch.Tensor,
    atol: float,
    tol: float,
    difference: float,
    failed: str,
    dtype: torch.dtype,
) -> Comparison:
    if not bool(truth.isfinite().all()) or truth.shape != ref.shape:
        return Comparison(False, "element", difference, failed)
    factor = 3.0 if dtype in (torch.float16, torch.bfloat16) or ref.numel() < FEW else 2.0
    mine, eager = (res - truth), (ref - truth)
    rmse, eager_rmse = float(mine.square().mean().sqrt()), float(eager.square().mean().sqrt())
    worst, eager_worst = float(mine.abs().max()), float(eager.abs().max())
    if rmse <= factor * eager_rmse + tol / 10 and worst <= 10 * eager_worst + atol:
        return Comparison(True, "float64", difference)
    return Comparison(
        False,
        "float64",
        difference,
        f"{failed}; against float64: RMSE {rmse:.3g} (eager {eager_rmse:.3g}), largest error {worst:.3g} "
        f"(eager {eager_worst:.3g})",
    )


def _kind(result: torch.Tensor, reference: torch.Tensor) -> str:
    if not isinstance(result, torch.Tensor):
        return f"a {type(result).__name__} where eager returns a tensor"
    if result.dtype != reference.dtype:
        return f"dtype {result.dtype}, eager {reference.dtype}"
    if result.shape != reference.shape:
        return f"shape {list(result.shape)}, eager {list(reference.shape)}"
    if result.device != reference.device:
        return f"device {result.device}, eager {reference.device}"
    return ""


def _bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0:
        return True
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = views[a.element_size()]
    same = a.contiguous().view(kind) == b.contiguous().view(kind)
    return bool(same.all()) or bool((same | (a.isnan() & b.isnan())).all())


def _max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs()
    difference = difference[difference.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def _special_places(a: torch.Tensor, b: torch.Tensor) -> str:
    if not torch.equal(a.isnan(), b.isnan()):
        return "NaN at other places than eager"
    infinite = a.isinf() | b.isinf()
    if bool(infinite.any()) and not torch.equal(a[infinite], b[infinite]):
        return "infinities at other places than eager"
    return ""


def _finite(value: torch.Tensor) -> torch.Tensor:
    wide = value.double()
    return torch.where(wide.isfinite(), wide, torch.zeros((), dtype=torch.float64, device=wide.device))


class Reference64:
    """The captured program in float64, node by node; the values behind discrete outputs are kept."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, leaves: Sequence[torch.Tensor]) -> dict[fx.Node, Any] | None:
        """The value of every node that an output or a decision needs; None when an op has no float64."""
        signature = self.program.signature
        inputs = iter([*leaves, *[self.program.state[i.name] for i in signature.state_inputs]])
        keep = set(self.program.output_node.all_input_nodes)
        keep |= {source for node in list(keep) for source in _decision_sources(node)}
        values: dict[fx.Node, Any] = {}
        uses = {node: len(node.users) for node in self.program.graph.nodes}
        try:
            with torch.no_grad():
                for node in self.program.graph.nodes:
                    self._step(node, values, inputs)
                    for source in node.all_input_nodes:
                        uses[source] -= 1
                        if not uses[source] and source not in keep:
                            values.pop(source, None)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return None  # no float64 kernel, or a value that float64 takes elsewhere: there is no better reference
        return values

    def _step(self, node: fx.Node, values: dict[fx.Node, Any], inputs: Any) -> None:
        if node.op == "placeholder":
            values[node] = _widen(next(inputs))
        elif node.op == "get_attr":
            values[node] = _widen(self.program.weights[str(node.target)])
        elif ops.is_call(node):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            target: Any = node.target
            values[node] = target(*map(_widen_dtype, args), **{k: _widen_dtype(v) for k, v in kwargs.items()})


def _widen(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        return value.detach().double()
    return value.detach().to(torch.complex128) if value.is_complex() else value.detach()


def _widen_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    return value


CHOICES = ("aten.argmax.default", "aten.argmin.default")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _decision_sources(node: fx.Node) -> list[fx.Node]:
    return [arg for arg in node.args if isinstance(arg, fx.Node)]


def decided_within_rounding(
    program: Program, output: fx.Node, values: Mapping[fx.Node, Any], result: torch.Tensor, reference: torch.Tensor
) -> bool:
    """Whether a discrete output differs only where the float64 margin of the decision is within rounding."""
    margin = _margin(output, values, result, reference)
    if margin is None or margin[0].shape != result.shape:
        return False
    gap, size = margin
    rtol, atol, _ = TOLERANCES[torch.float32]
    return bool((gap[result != reference] <= (atol + rtol * size)[result != reference]).all())


def _margin(
    output: fx.Node, values: Mapping[fx.Node, Any], result: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """How far apart the two decisions are in float64, and the size of what was compared."""
    name = str(output.target)
    if name in CHOICES:
        bound = ops.bind(output)
        value, dim = values[bound["self"]], bound["dim"]
        if dim is None:
            value, dim = value.reshape(-1), 0
        mine, eager = (
            i if bound["keepdim"] and bound["dim"] is not None else i.unsqueeze(dim) for i in (result, reference)
        )
        a, b = value.gather(dim, mine), value.gather(dim, eager)
        return (a - b).abs().reshape(result.shape), b.abs().reshape(result.shape)
    if name.split(".")[1:2] and name.split(".")[1] in COMPARISONS and len(output.args) == 2:
        a, b = (values[arg] if isinstance(arg, fx.Node) else torch.as_tensor(arg) for arg in output.args)
        a, b = torch.broadcast_tensors(a.double(), b.double())
        return (a - b).abs(), torch.maximum(a.abs(), b.abs())
    return None


@dataclass(frozen=True, slots=True)
class Expected:
    """What eager answered on one input set, and what it left in its inputs and in the model's state."""

    inputs: InputSet
    leaves: tuple[torch.Tensor, ...]
    structure: Structure
    written: tuple[torch.Tensor, ...]


class Oracle:
    """Eager's answers on a number of input sets, computed once, and the verdict on whoever claims to equal them.

    Args:
        model: the user's model; called under protection, in `seeds` of its own.
        program: the captured program before any pass: the float64 reference.
    """

    def __init__(self, model: Callable[..., Any], example: Example, program: Program | None, *, seed: int = 0) -> None:
        self.program = program
        self.seed = seed
        self.expected: list[Expected] = []
        self.skipped: list[str] = []
        self._wide: dict[str, dict[fx.Node, Any] | None] = {}
        state = list(program.state.values()) if program is not None else []
        self._state = state
        for inputs in input_sets(example, seed):
            self._ask(model, inputs, state)
        if all(expected.inputs.kind == SPECIAL for expected in self.expected):
            raise AccuracyError(
                "the model gives no finite value on any input, so nothing can be verified",
                why="; ".join(self.skipped)[:300],
                fix="pass an example_input of the kind that the model was made for",
            )

    def _ask(self, model: Callable[..., Any], inputs: InputSet, state: Sequence[torch.Tensor]) -> None:
        try:
            with self._frozen(model, state):
                call = inputs.clone()
                leaves, structure = flatten(model(*call.args, **call.kwargs), share=True)
                leaves = [leaf.detach().clone() for leaf in leaves]
                written = tuple(tensor.detach().clone() for tensor in self._after(call))
        except Exception as error:  # the model's own refusal of an input that we made up
            if inputs.kind == "example":
                raise AccuracyError(
                    "the model fails on the example input",
                    where=user_frame(error),
                    why=f"{type(error).__name__}: {str(error)[:200]}",
                ) from error
            self.skipped.append(f"{inputs.kind}: eager raises {type(error).__name__}")
            return
        floats = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel()]
        if inputs.kind != SPECIAL and floats and not any(bool(leaf.isfinite().any()) for leaf in floats):
            self.skipped.append(f"{inputs.kind}: eager returns no finite value")
            return
        self.expected.append(Expected(inputs, tuple(leaves), structure, written))

    def _after(self, call: Example) -> list[torch.Tensor]:
        """The tensors that a call may have written: its inputs, then the model's state."""
        leaves, _ = flatten((call.args, call.kwargs))
        return [*leaves, *self._state]

    def _frozen(self, model: Any, state: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        return _Seeded(protected(model, written=state), self.seed)

    def judge(self, candidate: Callable[..., Any], *, exact: bool = False) -> Verdict:
        """The verdict on a candidate.

        Raises:
            Exception: whatever the candidate raises.
        """
        done: list[str] = []
        test, worst = "bits", 0.0
        first: list[tuple[torch.Tensor, torch.Tensor]] = []
        for expected in self.expected:
            kind = expected.inputs.kind
            if kind == SPECIAL and not exact:
                continue
            with self._frozen(None, self._state):
                call = expected.inputs.clone()
                leaves, structure = flatten(candidate(*call.args, **call.kwargs), share=True)
                spoilt = self._spoilt(expected, self._after(call), exact)
            done.append(kind)
            first = first or [(leaf, leaf.clone()) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            failure = _structure_fault(structure, expected.structure, leaves, expected.leaves) or spoilt
            if failure:
                return Verdict(False, "type", worst, tuple(done), tuple(self.skipped), f"{failure} ({kind} input)")
            for position, (value, reference) in enumerate(zip(leaves, expected.leaves, strict=True)):
                found = self._compare(value, reference, position, expected, exact)
                if kind != "large":
                    worst = max(worst, found.max_difference)
                if not found.ok:
                    name = dict(expected.structure.paths()).get(position) or "output"
                    reason = f"{name} on the {kind} input: {found.reason}"
                    return Verdict(False, found.test, worst, tuple(done), tuple(self.skipped), reason)
                test = max(test, found.test, key=ORDER.index)
        if not all(_bit_equal(leaf, kept) for leaf, kept in first):
            reason = "an output of the first call was overwritten by a later one"
            return Verdict(False, "type", worst, tuple(done), tuple(self.skipped), reason)
        return Verdict(True, test, worst, tuple(done), tuple(self.skipped))

    def _spoilt(self, expected: Expected, after: Sequence[torch.Tensor], exact: bool) -> str:
        """What a candidate wrote otherwise than eager, to its inputs or to the model's state."""
        inputs = len(expected.written) - len(self._state)
        for position, (value, reference) in enumerate(zip(after, expected.written, strict=True)):
            found = compare(value, reference, exact=exact)
            if not found.ok:
                what = "an input" if position < inputs else "the model's state"
                return f"{what} is not left as eager leaves it: {found.reason}"
        return ""

    def _compare(
        self, value: torch.Tensor, reference: torch.Tensor, position: int, expected: Expected, exact: bool
    ) -> Comparison:
        found = compare(value, reference, exact=exact, reference64=lambda: self._wide_output(expected, position))
        if found.ok or found.test == "type" or exact or reference.dtype in TOLERANCES or self.program is None:
            return found
        wide = self._wide_values(expected)
        output = self._outputs()[position]
        if wide is not None and decided_within_rounding(self.program, output, wide, value, reference):
            return replace(found, ok=True, test="decision", reason="")
        return found

    def _outputs(self) -> list[fx.Node]:
        program = self.program
        return [] if program is None else program.outputs[len(program.signature.writes) :]

    def _wide_output(self, expected: Expected, position: int) -> torch.Tensor | None:
        wide = self._wide_values(expected)
        return None if wide is None else wide[self._outputs()[position]]

    def _wide_values(self, expected: Expected) -> dict[fx.Node, Any] | None:
        if self.program is None:
            return None
        kind = expected.inputs.kind
        if kind not in self._wide:
            leaves, _ = flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
            self._wide[kind] = Reference64(self.program).run(leaves)
        return self._wide[kind]


class _Seeded(AbstractContextManager[Any]):
    """A context entered with the same random state each time, so that dropout draws the same."""

    def __init__(self, inner: AbstractContextManager[Any], seed: int) -> None:
        self.inner, self.seed = inner or nullcontext(), seed

    def __enter__(self) -> None:
        self.inner.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *details: Any) -> bool | None:
        return self.inner.__exit__(*details)


def _structure_fault(mine: Structure, theirs: Structure, leaves: Sequence[Any], expected: Sequence[Any]) -> str:
    if len(leaves) != len(expected):
        return f"{len(leaves)} output tensors, eager returns {len(expected)}"
    return "" if mine == theirs else f"output of the form {mine}, eager returns {theirs}"[:300]


def verify(
    model: Callable[..., Any],
    candidate: Callable[..., Any],
    example_input: Any,
    *,
    program: Program | None = None,
    exact: bool = False,
    seed: int = 1,
) -> Verdict:
    """Compares a candidate with the model on inputs like the example.

    Args:
        program: the captured program, for the float64 reference; captured here when None.
        exact: the values must be equal to the bit.

    Raises:
        AccuracyError: it computes something else.
        BackendError: it fails.
    """
    example = as_example(example_input)
    if program is None:
        from tsopt.compiler.capture import capture

        program = capture(model, example, allow_nan=True)
    oracle = Oracle(model, example, program, seed=seed)
    try:
        verdict = oracle.judge(candidate, exact=exact)
    except Exception as error:  # the candidate's own failure
        raise BackendError(
            "the candidate fails where the model does not", why=f"{type(error).__name__}: {error}"
        ) from error
    if not verdict.ok:
        raise AccuracyError("the candidate does not compute what the model computes", why=verdict.reason)
    return verdict


def is_exact(program: Program, backend: str) -> bool:
    """Whether bits are promised: torch's own kernels under EXACT rewrites alone."""
    return backend == "eager" and program.numerics == Numerics.EXACT
