"""What each layer adds to the error of the outputs: against the error itself, and where gradients do not exist."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Residual, images, mlp, seeded
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.quantize.effects import losses_with_effects
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.sensitivity import by_group
from tsopt.passes.quantize.weights import Int8Weights


def effects(program, calls, corrected=False):
    found = losses_with_effects(
        *(program, layers_of(program), calls),
        rounding=by_group,
        largest=127,
        corrected=corrected,
        progress=lambda text: None,
    )
    return {name: loss.effect for name, loss in found.items()}


def measured(program, layer, calls):
    """The squared relative error of the output with one layer in int8."""
    made, _ = run(program, (Int8Weights(frozenset({layer.name})),), Limits(Numerics.LOSSY))
    made, noise, size = simulated(made), 0.0, 0.0
    for call in calls:
        with torch.no_grad():
            (found,), (wanted,) = made.module()(*call), program.module()(*call)
        noise += float((found - wanted).square().sum())
        size += float(wanted.square().sum())
    return noise / size


def test_an_effect_is_the_error_of_the_output_that_the_layer_causes():
    program = tsopt.capture(mlp(32, 64, 64, 8), torch.randn(16, 32))
    calls = [(torch.randn(16, 32, generator=seeded(seed)),) for seed in range(32)]
    found = effects(program, calls)
    for layer in layers_of(program):
        assert math.log10(found[layer.name] / measured(program, layer, calls)) == pytest.approx(0, abs=0.25)


def test_an_error_counts_by_the_size_of_the_outputs_of_its_call():
    """Where outputs are near zero because large terms cancel, the relative error of that one call says little."""
    weight = torch.randn(8, 16, generator=seeded(1))
    weight -= weight.mean(1, keepdim=True)
    x = torch.randn(4, 16, generator=seeded(0))
    program = tsopt.capture(Net(lambda self, x: F.linear(x, weight)), x)
    (layer,) = layers_of(program)
    usual, cancelled, both = (
        effects(program, calls)[layer.name] for calls in ([(x,)], [(x * 1e-3 + 1,)], [(x,), (x * 1e-3 + 1,)])
    )
    assert cancelled > 100 * usual
    assert both == pytest.approx(measured(program, layer, [(x,), (x * 1e-3 + 1,)]), rel=0.5)


def test_a_layer_that_hardly_counts_has_a_small_effect():
    """Its own error is like that of the others."""

    def model(self, x):
        return F.linear(x, a) + 1e-3 * F.linear(x, b)

    a, b = (torch.randn(8, 16, generator=seeded(seed)) for seed in (1, 2))
    program = tsopt.capture(Net(model), torch.randn(4, 16))
    large, small = effects(program, [(torch.randn(4, 16, generator=seeded(0)),)]).values()
    assert small < large * 1e-4


def test_an_error_that_is_corrected_does_not_count():
    program = tsopt.capture(mlp(16, 8), torch.randn(1, 16))
    (layer,) = layers_of(program)
    call = (torch.randn(1, 16, generator=seeded(0)),)
    corrected, whole = (effects(program, [call], corrected)[layer.name] for corrected in (True, False))
    assert corrected < 1e-6 * whole, "the error of a single row is its mean"


def test_a_correction_is_of_all_calls():
    """Opposite errors in two calls: their mean corrects nothing."""
    program = tsopt.capture(mlp(16, 8), torch.randn(1, 16))
    (layer,) = layers_of(program)
    x = torch.randn(1, 16, generator=seeded(0))
    corrected, whole = (effects(program, [(x,), (-x,)], corrected)[layer.name] for corrected in (True, False))
    assert corrected == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("kind", ["several outputs", "an integer", "a mask of infinities"])
def test_outputs_of_all_kinds(kind):
    weight = torch.randn(8, 16, generator=seeded(1))

    def model(self, x):
        y = F.linear(x, weight)
        others = {
            "several outputs": (y * 1e6, x.sum()),
            "an integer": (y.argmax(-1),),
            "a mask of infinities": (y.masked_fill(y < 0, -math.inf),),
        }
        return (y, *others[kind])

    program = tsopt.capture(Net(model), torch.randn(4, 16))
    (effect,) = effects(program, [(torch.randn(4, 16, generator=seeded(0)),)]).values()
    assert 1e-6 < effect < 1e-3


def test_the_effect_of_a_layer_that_no_output_depends_on_smoothly_is_not_known():
    first, second = (torch.randn(8, 16, generator=seeded(seed)) for seed in (1, 2))

    def model(self, x):
        return F.linear(x, first).argmax(-1), F.linear(x, second)

    program = tsopt.capture(Net(model), torch.randn(4, 16))
    of_class, of_output = effects(program, [(torch.randn(4, 16),)]).values()
    assert of_class is None
    assert of_output > 0

    program = tsopt.capture(Net(lambda self, x: model(self, x)[0]), torch.randn(4, 16))
    assert set(effects(program, [(torch.randn(4, 16),)]).values()) == {None}


@pytest.mark.parametrize(
    "end",
    [lambda y: (y * 0).sqrt() + y, lambda y: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, 0, 255).detach()],
    ids=["an infinite gradient", "detached"],
)
def test_where_gradients_say_nothing_there_are_no_effects(end):
    weight = torch.randn(8, 16, generator=seeded(1))
    program = tsopt.capture(Net(lambda self, x: end(F.linear(x, weight))), torch.randn(4, 16))
    (effect,) = effects(program, [(torch.randn(4, 16),)]).values()
    assert not effect


def test_the_model_is_left_as_it_is():
    model = Residual().eval()
    with torch.inference_mode():
        call = (images(1)[0] * 1.0,)
    program = tsopt.capture(model, images(1)[0])
    state = torch.random.get_rng_state()
    assert all(effects(program, [call]).values()), "data may come from inference mode"
    assert all(weight.grad is None for weight in (*model.parameters(), *program.weights.values()))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert effects(program, [call]) == effects(program, [call])


def test_nothing_of_it_stays_in_memory():
    """Hooks of tensors keep what they refer to, and no collector sees it."""

    def tensors():
        gc.collect()
        return sum(type(item) is torch.Tensor for item in gc.get_objects())

    program = tsopt.capture(mlp(16, 16, 8), torch.randn(4, 16))
    calls = [(torch.randn(4, 16, generator=seeded(seed)),) for seed in range(3)]
    effects(program, calls)
    before = tensors()
    for _ in range(3):
        effects(program, calls)
    assert tensors() <= before  # what earlier tests have left may go meanwhile
