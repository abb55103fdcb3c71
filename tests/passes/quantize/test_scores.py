"""Scores of attention in int8: what is rounded, how well, and what is left as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Attention, Convolved, calibrated_pass, sequences
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.quantized import (
    QParams,
    calibrated_input,
    quantized_layers,
    rounded_values,
    without_rounded_values,
)
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of, with_float_scores
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.quantize.observe import observe
from tsopt.passes.quantize.scores import ScoresInInt8


def rounded(model, *calls, **options):
    """The program with the scores of its attention in int8, with parameters from these calls; and as it was."""
    program = tsopt.transform(tsopt.capture(model if isinstance(model, nn.Module) else Net(model), calls[0]))
    return with_rounded_scores(program, *calls, **options), program


def with_rounded_scores(program, *calls, only=None, fuel=None):
    operands = {operand for node in attentions_of(program) for operand in operands_of(node)}
    seen = observe(program, [(x,) for x in calls], operands, lambda text: None)
    qparams = {name: item.qparams(symmetric=True) for name, item in seen.items()}
    names = frozenset(node.name for node in attentions_of(program)) if only is None else only
    made, _ = run(program, (ScoresInInt8(qparams, names),), Limits(Numerics.LOSSY, fuel=fuel))
    verify_program(made)
    return made


def answer(program, x):
    with torch.no_grad():
        return program.module()(x)[0]


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_queries_and_keys_are_rounded_and_values_are_not():
    made, program = rounded(Attention().eval(), *sequences(4))
    (attention,) = attentions_of(made)
    found = [calibrated_input(operand) for operand in operands_of(attention)]
    assert all(by.is_symmetric and by.zero == 0 for _, by in found)
    assert calibrated_input(ops.bind(attention)["value"]) is None
    assert made.numerics == Numerics.LOSSY
    assert 0 < error(answer(made, sequences(1)[0]), answer(program, sequences(1)[0])) < 0.01
    assert not list(quantized_layers(made))


def test_attention_to_itself_keeps_its_values():
    """Queries, keys and values are one value."""
    made, _ = rounded(lambda self, x: F.scaled_dot_product_attention(x, x, x), *sequences(2))
    (attention,) = attentions_of(made)
    query, key = operands_of(attention)
    assert query is key
    assert calibrated_input(query)[0] is ops.bind(attention)["value"]
    assert sum("dequantize" in str(node.target) for node in made.calls()) == 1


def test_only_the_chosen_calls_are_rounded():
    for options in ({"only": frozenset()}, {"fuel": 0}):
        made, program = rounded(Attention().eval(), *sequences(2), **options)
        assert made.numerics == program.numerics
        assert not rounded_values(made)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_attention_in_other_types_is_left_as_it_is(kind):
    program = tsopt.capture(Net(lambda self, x: F.scaled_dot_product_attention(x, x, x)), sequences(1)[0].to(kind))
    assert not attentions_of(program)


def test_without_integers_it_is_the_program_that_it_was():
    made, program = rounded(Attention().eval(), *sequences(2))
    x = sequences(1)[0]
    for back in (with_float_scores(made), without_rounded_values(made)):
        verify_program(back)
        assert torch.equal(answer(back, x), answer(program, x))
        assert [node for node in back.calls() if "quantize" in str(node.target)] == []
    assert rounded_values(made), "the one that was given"


def test_the_simulation_rounds_alike():
    made, _ = rounded(Attention().eval(), *sequences(4))
    for x in (*sequences(2), 100 * sequences(1)[0]):
        assert torch.allclose(answer(simulated(made), x), answer(made, x), atol=1e-5)


def test_symmetric_parameters_cover_a_magnitude_and_keep_zero_exact():
    by = QParams.symmetric(2.54)
    assert by.range == pytest.approx((-2.56, 2.54))
    assert (by.zero, by.integers) == (0, (-128, 127, torch.int8))
    assert QParams.symmetric(0.0).scale > 0
    assert QParams.of_range(-1.0, 3.0).range == pytest.approx((-1.0, 3.0), abs=0.02)


def test_operands_given_by_name_are_replaced_too():
    made, _ = rounded(lambda self, x: F.scaled_dot_product_attention(x, x, x), *sequences(1))
    (attention,) = attentions_of(made)
    query, key, value = attention.args[:3]
    attention.args, attention.kwargs = (), {"query": query, "key": key, "value": value}
    back = with_float_scores(made)
    verify_program(back)
    (attention,) = attentions_of(back)
    assert len(set(operands_of(attention))) == 1
    assert [node for node in back.calls() if "quantize" in str(node.target)] == []


def test_what_is_rounded_for_a_layer_stays_so():
    program = tsopt.capture(Convolved().eval(), sequences(1)[0])
    made, _ = run(program, (calibrated_pass(program, [(x,) for x in sequences(2)]),), Limits(Numerics.LOSSY))
    (attention,) = attentions_of(made)
    assert all(map(calibrated_input, operands_of(attention)))
    assert with_float_scores(made) is made
