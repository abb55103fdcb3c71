"""Random programs against the pipeline: invariants, numbers, memory, rest, order, subsets, fuel, files, capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.passes.helpers import assert_same_bits, capture
from tests.passes.program_builder import Drawn
from tests.passes.quantize.models import calibrated_pass
from tests.passes.random_programs import RULES, around, programs
from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import in_float
from tsopt.compiler.graph.serialize import read_program, write_program
from tsopt.compiler.graph.stored_ops import refusal
from tsopt.compiler.graph.verify import output_aliases, verify_program
from tsopt.compiler.precision_names import INTEGER_VARIANTS
from tsopt.compiler.rewriting.pass_base import Limits, Pass, Repeat
from tsopt.compiler.rewriting.pipeline import PassRecord, run
from tsopt.compiler.rewriting.rewrite import RulePass
from tsopt.errors import BundleError, NoGain
from tsopt.passes import STANDARD
from tsopt.passes.quantize.dynamic import DynamicInt8
from tsopt.quantization.quantize import Int8Options, quantize
from tsopt.runtime.checking.compare import compare
from tsopt.runtime.checking.reference64 import Reference64

pytestmark = pytest.mark.filterwarnings("ignore")


def campaign(examples: int, factor: int) -> Callable[[Any], Any]:
    """The same examples in every run."""
    return settings(
        max_examples=examples * factor,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ---- numbers ----------------------------------------------------------------------------------------------

Values = dict[fx.Node, Any]
NOISY_RUNS = 12


def evaluate(
    program: Program, inputs: Sequence[torch.Tensor], disturb: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The outputs, with the same draws each time. `disturb` is put after every value: what rounding does to them."""
    torch.manual_seed(0)
    change = disturb or (lambda tensor: tensor)
    given_ = iter(inputs)
    values: Values = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                found: Any = next(given_)
            elif node.op == "get_attr":
                found = program.weights[str(node.target)]
            elif ops.is_call(node):
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                found = node.target(*args, **kwargs)
            else:
                break
            values[node] = [change(t) for t in found] if isinstance(found, (list, tuple)) else change(found)
    return [values[node] for node in program.outputs]


def noise(generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every float moved by a few of its own rounding errors; zeros by their sign alone."""

    def disturb(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        size = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-4, 4, generator=generator)
        moved = tensor.double() * (1 + size * torch.finfo(tensor.dtype).eps)
        signs = torch.where(size > 0, 1.0, -1.0).to(moved)
        return torch.where(moved == 0, torch.zeros_like(moved).copysign(signs), moved).to(tensor.dtype)

    return disturb


def assert_rounds(found: list[torch.Tensor], before: Program, inputs: Sequence[torch.Tensor]) -> None:
    """Outputs within the tolerance of ROUNDING, or no further away than rounding itself can push this program."""
    wanted = evaluate(before, inputs)
    doubt: Iterator[Any] | None = None
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if compare(mine, theirs).ok:
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        doubt = doubt or _doubts(before, inputs, wanted)
        moved, truth = doubt[i]
        distance = _distance(mine, theirs)
        allowed = 20 * moved
        wrong = ~(distance <= allowed + 1e-6)
        if truth is not None:  # where eager is the one that is wrong, the truth is as good
            wrong &= ~(_distance(mine, truth) <= _distance(theirs, truth) + allowed)
        assert not bool(wrong.any()), f"output {i}: {mine[wrong]} instead of {theirs[wrong]}, noise {moved[wrong]}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Element by element, infinite where one is special and the other is not the same."""
    a, b = a.double(), b.double()
    distance = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, torch.where(distance.isfinite(), distance, float("inf")))


def _doubts(before: Program, inputs: Sequence[torch.Tensor], wanted: list[torch.Tensor]) -> list[Any]:
    """For each output how far rounding moves each element, and its value in float64."""
    generator = torch.Generator().manual_seed(0)
    moved = [torch.zeros(t.shape, dtype=torch.float64) for t in wanted]
    for _ in range(NOISY_RUNS):
        disturb = noise(generator)
        for i, value in enumerate(evaluate(before, [disturb(x) for x in inputs], disturb)):
            moved[i] = torch.maximum(moved[i], _distance(value, wanted[i]))
    truth = Reference64(before).run(inputs)
    return [(m, None if truth is None else truth[node]) for m, node in zip(moved, before.outputs, strict=True)]


# ---- properties -------------------------------------------------------------------------------------------


def shared_memory(program: Program, inputs: Sequence[torch.Tensor]) -> set[tuple[int, str]]:
    """Which outputs share memory with which input, weight or earlier output, as it turns out in a run."""
    inputs = [x.clone(memory_format=torch.preserve_format) for x in inputs]
    outputs = evaluate(program, inputs)
    places = {f"input {i}": x for i, x in enumerate(inputs)} | {f"weight {k}": w for k, w in program.weights.items()}
    found = set()
    for i, value in enumerate(outputs):
        here = value.untyped_storage().data_ptr()
        found |= {(i, name) for name, other in places.items() if here and other.untyped_storage().data_ptr() == here}
        places[f"output {i}"] = value
    return found


def has_nan(values: Sequence[torch.Tensor]) -> bool:
    return any(bool(value.isnan().any()) for value in values)


def kernels_that_keep_nan() -> AbstractContextManager[None]:
    """The kernel of attention that returns NaN for NaN, so that what the rewrites do is what is tested.

    The fused kernel on CPU returns 0 where all scores of a row are NaN.
    """
    return sdpa_kernel(SDPBackend.MATH)


def assert_kept(drawn: Drawn, after: Program, *, special: bool = True) -> None:
    """The program after computes what the program before does, and shares no memory that it does not."""
    before = drawn.program
    verify_program(after, aliases=output_aliases(before))
    assert shared_memory(after, drawn.inputs) <= shared_memory(before, drawn.inputs)
    exact = after.numerics == Numerics.EXACT
    for inputs in (drawn.inputs, drawn.special_inputs()) if special and exact else (drawn.inputs,):
        try:
            wanted = evaluate(before, inputs)
        except (RuntimeError, IndexError):
            continue  # the model refuses these values
        if not exact:
            with kernels_that_keep_nan() if has_nan(wanted) else nullcontext():
                assert_rounds(evaluate(after, inputs), before, inputs)
            continue
        found = evaluate(after, inputs)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_same_bits(mine, theirs)


def assert_at_rest(after: Program, passes: Sequence[Pass | Repeat], level: Numerics) -> None:
    again, records = run(after, passes, Limits(level))
    assert again.text == after.text, fired(records)


def fired(records: Sequence[PassRecord]) -> set[str]:
    return {done.rule for record in records for done in record.done}


LEVELS = [Numerics.EXACT, Numerics.ROUNDING]


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_the_pipeline_keeps_random_programs(level, fuzz_factor):
    @campaign(40, fuzz_factor)
    @given(drawn=programs())
    def check(drawn):
        text = drawn.program.text
        after, _ = run(drawn.program, STANDARD, Limits(level))
        assert drawn.program.text == text
        assert_kept(drawn, after)
        assert_at_rest(after, STANDARD, level)

    check()


@pytest.mark.sliced(40)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_keeps_programs_around_its_pattern(rule, fuzz_factor):
    """The rule alone, then the whole pipeline."""

    @campaign(2, fuzz_factor)
    @given(drawn=around(rule))
    def check(drawn):
        for passes in ((RulePass("alone", (rule,)),), STANDARD):
            after, _ = run(drawn.program, passes, Limits(Numerics.ROUNDING))
            assert_kept(drawn, after)
            assert_at_rest(after, passes, Numerics.ROUNDING)

    check()


def test_quantization_keeps_random_programs_legal(fuzz_factor):
    """How near the answers are is for a race to judge: values of random programs know no bounds."""
    quantized = known = 0

    @campaign(20, fuzz_factor)
    @given(drawn=st.sampled_from([rule for rule in RULES if "linear" in rule.name]).flatmap(around))
    def check(drawn):
        nonlocal quantized, known
        before = drawn.program
        for program in (before, run(before, STANDARD)[0]):
            static = calibrated_pass(program, [drawn.inputs])
            after, records = run(program, (DynamicInt8(),), Limits(Numerics.LOSSY))
            calibrated, more = run(program, (static,), Limits(Numerics.LOSSY))
            quantized += sum(len(record.done) for record in records)
            known += sum(len(record.done) for record in more)
            assert (after is program) == (not fired(records))
            assert (calibrated is program) == (not fired(more))
            results = [form for made in (after, calibrated) for form in (made, run(made, STANDARD)[0], in_float(made))]
            for made in (*results, simulated(after), simulated(calibrated)):
                verify_program(made, aliases=output_aliases(before))
                assert shared_memory(made, drawn.inputs) <= shared_memory(before, drawn.inputs)
                for mine, theirs in zip(evaluate(made, drawn.inputs), evaluate(before, drawn.inputs), strict=True):
                    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)

    check()
    assert quantized > 10
    assert known > 5, "of random values many are not finite, and their layers stay in float32"


def test_random_programs_are_calibrated_and_layers_chosen_without_an_error(fuzz_factor):
    """All of it: factors of channels, ranges, errors and effects of layers, corrections, and the choice by a limit."""
    layers = [rule for rule in RULES if any(name in rule.name for name in ("linear", "conv", "attention"))]
    made = 0

    @campaign(8, fuzz_factor)
    @given(drawn=st.one_of(programs(), st.sampled_from(layers).flatmap(around)), max_drop=st.sampled_from([None, 0.05]))
    def check(drawn, max_drop):
        nonlocal made
        model, call = drawn.program.module(), as_example(tuple(drawn.inputs))
        program = run(capture(model, call, allow_nan=True), STANDARD)[0]
        found = quantize(model, program, call, INTEGER_VARIANTS, Int8Options(calibration=[call] * 4, max_drop=max_drop))
        for name, variant in found.variants.items():
            if isinstance(variant, NoGain):
                assert "internal error" not in variant.what, name
                continue
            made += 1
            verify_program(variant, aliases=output_aliases(program))
            for mine, theirs in zip(evaluate(variant, drawn.inputs), evaluate(program, drawn.inputs), strict=True):
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)

    check()
    assert made > 3


def flat(passes: Sequence[Pass | Repeat]) -> list[Pass]:
    return [inner for item in passes for inner in (flat(item.passes) if isinstance(item, Repeat) else [item])]


def test_any_order_and_any_subset_of_the_passes_is_correct(fuzz_factor):
    @campaign(20, fuzz_factor)
    @given(drawn=programs(), order=st.permutations(flat(STANDARD)), count=st.integers(1, len(flat(STANDARD))))
    def check(drawn, order, count):
        after, _ = run(drawn.program, order[:count], Limits(Numerics.ROUNDING))
        assert_kept(drawn, after)

    check()


def test_any_fuel_is_correct(fuzz_factor):
    @campaign(20, fuzz_factor)
    @given(drawn=programs(), fuel=st.integers(0, 12), level=st.sampled_from(LEVELS))
    def check(drawn, fuel, level):
        after, _ = run(drawn.program, STANDARD, Limits(level, fuel))
        assert_kept(drawn, after)

    check()


@pytest.mark.parametrize("optimized", [False, True], ids=["captured", "optimized"])
def test_a_stored_program_comes_back_the_same(optimized, fuzz_factor, tmp_path):
    @campaign(6, fuzz_factor)
    @given(drawn=programs())
    def check(drawn):
        program = run(drawn.program, STANDARD)[0] if optimized else drawn.program
        write_program(program, tmp_path)
        if any(refusal(node.target, node.args, node.kwargs) for node in program.calls()):
            assert not optimized, "what a decomposed program calls has been recomposed"
            with pytest.raises(BundleError, match="is not allowed in a file"):
                read_program(tmp_path)
            return
        made = read_program(tmp_path)
        assert made.text == program.text
        assert made.fingerprint(contents=True) == program.fingerprint(contents=True)
        assert made.numerics == program.numerics
        verify_program(made)
        found = evaluate(made, drawn.inputs)
        torch.manual_seed(0)
        for mine, theirs in zip(found, program.module()(*drawn.inputs), strict=True):
            assert_same_bits(mine, theirs)

    check()


def test_capture_gives_the_same_numbers(fuzz_factor):
    """The program as a model: captured again it computes the same bits, and so does its optimized form."""

    @campaign(8, fuzz_factor)
    @given(drawn=programs())
    def check(drawn):
        captured = capture(drawn.program.module(), drawn.inputs)
        # Nested as the model nests them: a tensor that it returns twice is one value of the program.
        found = captured.signature.unbind(evaluate(captured, drawn.inputs), tuple(drawn.inputs), {})
        for mine, theirs in zip(found, evaluate(drawn.program, drawn.inputs), strict=True):
            assert_same_bits(mine, theirs)
        after, _ = run(captured, STANDARD, Limits(Numerics.EXACT))
        assert_kept(Drawn(captured, drawn.inputs), after)

    check()
