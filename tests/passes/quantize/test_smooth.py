"""Outlier channels go from the input into the weight, where that helps, and the program computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import calibrated_pass, mlp, seeded
from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.smooth import Smooth, factors_for, readers
from tsopt.quantization.quantize import Int8Options, quantize

SIZE = 32


SCALES = torch.ones(SIZE)
SCALES[5] = 300.0
W = torch.randn(8, SIZE, generator=seeded(1))


class Normed(nn.Module):
    """A norm with an outlier channel, read by two linear layers, and by a sum if it is `shared`."""

    def __init__(self, norm=nn.LayerNorm, shared=False, outlier=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.left, self.right = norm(SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.shared = shared
        if outlier:
            with torch.no_grad():
                self.norm.weight[3] = 100.0

    def forward(self, x):
        x = self.norm(x)
        y = self.left(x) * self.right(x)
        return y + x if self.shared else y


def rows(count=16):
    return torch.randn(count, SIZE, generator=seeded(0))


def smoothed(model, *calls):
    program = tsopt.transform(tsopt.capture(model, calls[0]))
    layers = layers_of(program)
    said: list[str] = []
    factors = factors_for(program, layers, [(x,) for x in calls], largest=127, progress=said.append)
    assert said == [f"{number} of {len(calls)}" for number in range(1, len(calls) + 1)]
    made, _ = run(program, (Smooth(factors, frozenset(layer.name for layer in layers)),), Limits())
    verify_program(made)
    return program, made, factors


def close(program, model, x):
    with torch.no_grad():
        return torch.allclose(program.module()(x)[0], model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_is_divided_itself(norm):
    model, x = Normed(norm).eval(), rows()
    before, after, factors = smoothed(model, x)
    (value,) = factors
    assert factors[value].argmax() == 3
    assert factors[value][3] > 5 * factors[value].median()
    assert len(list(after.calls())) == len(list(before.calls()))
    assert after.numerics == Numerics.ROUNDING
    assert close(after, model, x)


def test_a_norm_without_a_weight_is_divided_after_it():
    class Plain(Normed):
        def forward(self, x):
            return super().forward(x * SCALES)

    model, x = Plain(lambda size: nn.LayerNorm(size, elementwise_affine=False), outlier=False).eval(), rows()
    before, after, factors = smoothed(model, x)
    assert len(factors) == 1
    assert len(list(after.calls())) == len(list(before.calls())) + 1
    assert close(after, model, x)


def test_a_norm_with_a_computed_weight_is_divided_after_it():
    def forward(self, x):
        return F.linear(F.layer_norm(x, (SIZE,), SCALES * x.abs().amax()), W)

    model, x = Net(forward), rows()
    before, after, factors = smoothed(model, x)
    assert len(factors) == 1
    assert len(list(after.calls())) == len(list(before.calls())) + 1
    assert close(after, model, x)


def two_layers(between, bias=True):
    """The fifth output of the first layer is much larger than the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=bias), between, nn.Linear(SIZE, 8)).eval()
    with torch.no_grad():
        model[0].weight[5] = 60 * model[0].weight[5].sign()
    return model


@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU(), nn.LeakyReLU(0.1)], ids=repr)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_divided_itself(between, bias):
    model, x = two_layers(between, bias), rows()
    before, after, factors = smoothed(model, x)
    assert len(factors) == 1
    assert [node.target for node in after.calls()] == [node.target for node in before.calls()]
    assert close(after, model, x)


def test_a_layer_whose_result_is_read_elsewhere_is_not_divided():
    model, x = two_layers(nn.ReLU()), rows()
    others = {
        "the layer": lambda self, x: (y := model[0](x), model[2](y.relu())),
        "the activation": lambda self, x: (y := model[0](x).relu(), model[2](y)),
    }
    for forward in others.values():
        before, after, factors = smoothed(Net(forward), x)
        assert len(factors) == 1
        assert len(list(after.calls())) == len(list(before.calls())) + 1
        with torch.no_grad():
            for found, wanted in zip(after.module()(x), forward(None, x), strict=True):
                assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_layer_after_another_activation_is_divided_after_it():
    model, x = two_layers(nn.GELU()), rows()
    before, after, factors = smoothed(model, x)
    assert len(factors) == 1
    assert len(list(after.calls())) == len(list(before.calls())) + 1
    assert close(after, model, x)


def test_each_value_takes_fuel():
    x = rows()
    program = tsopt.transform(
        tsopt.capture(Net(lambda self, x: F.linear(x * SCALES, W) + F.linear(x * SCALES.flip(0), W)), x)
    )
    named = layers_of(program)
    factors = factors_for(program, named, [(x,)], largest=127, progress=lambda text: None)
    assert len(factors) == 2
    change = Smooth(factors, frozenset(layer.name for layer in named))
    for fuel in range(3):
        _, (record,) = run(program, (change,), Limits(fuel=fuel))
        assert len(record.done) == fuel


def test_a_value_that_others_read_is_divided_for_the_layers_only():
    model, x = Normed(shared=True).eval(), rows()
    before, after, _ = smoothed(model, x)
    assert len(list(after.calls())) == len(list(before.calls())) + 1
    assert close(after, model, x)


def test_the_range_of_the_input_shrinks_and_so_does_the_loss():
    model, x = Normed().eval(), rows(64)
    program = tsopt.transform(tsopt.capture(model, x))
    found = quantize(model, program, as_example(x), ("int8-static",), Int8Options(calibration=[x, x + 0.1]))
    plain = quantize(model, program, as_example(x), ("int8",), Int8Options())
    assert min(layer.sqnr for layer in found.layers_in("int8-static")) > 3 + min(
        layer.sqnr for layer in plain.layers_in("int8")
    )


def test_nothing_is_done_where_it_does_not_help():
    x = rows()
    before, after, factors = smoothed(nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 8)).eval(), x)
    assert factors == {}
    assert after.text == before.text


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_stays_as_it_is(bad):
    x = rows()
    x[0, 0] = bad
    _, _, factors = smoothed(Net(lambda self, x: F.linear(x * SCALES, W)), rows(), x)
    assert factors == {}


def test_a_channel_that_is_always_zero_or_that_no_weight_reads():
    scales, weight = SCALES.clone(), W.clone()
    scales[0], weight[:, 1] = 0.0, 0.0
    model, x = Net(lambda self, x: F.linear(x * scales, weight)), rows()
    _, after, factors = smoothed(model, x)
    (found,) = factors.values()
    assert found[1] == 1
    assert bool((found.isfinite() & (found > 0)).all())
    assert close(after, model, x)


def test_other_readers_of_a_weight_keep_it():
    model, x = Net(lambda self, x: F.linear(x * SCALES, W) + W.sum()), rows()
    _, after, factors = smoothed(model, x)
    assert factors
    assert close(after, model, x)


# ---- weights that several layers read ----------------------------------------------------------------------


class Repeated(nn.Module):
    """One block, called again and again. Outlier channels are in its norm, and between its layers."""

    def __init__(self, between=F.relu, times=4):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.between, self.times = between, times
        with torch.no_grad():
            self.norm.weight[3] = 100.0
            self.up.bias[5] = 500.0

    def forward(self, x):
        for _ in range(self.times):
            x = x + self.down(self.between(self.up(self.norm(x))))
        return x


def matrices(program):
    return [weight for weight in program.weights.values() if weight.dim() == 2]


@pytest.mark.parametrize("between", [F.relu, F.gelu])
def test_a_block_that_is_called_many_times_has_its_weights_once(between):
    model, x = Repeated(between).eval(), rows()
    before, after, factors = smoothed(model, x)
    assert len(factors) == 8, "the inputs of two layers, four times"
    assert len({id(shared) for shared in factors.values()}) == 2
    assert len(matrices(after)) == len(matrices(before)) == 2
    assert len(list(after.calls())) == len(list(before.calls())) + (0 if between is F.relu else 4)
    assert close(after, model, x)


def test_a_block_that_is_called_many_times_has_its_integers_once():
    model, x = Repeated().eval(), rows()
    _, after, _ = smoothed(model, x)
    program, _ = run(after, (calibrated_pass(after, [(x,)]),), Limits(Numerics.LOSSY))
    assert [weight.dtype for weight in matrices(program)] == [torch.int8, torch.int8]


def test_values_that_one_weight_is_multiplied_with_have_factors_for_the_outliers_of_both():
    model = Net(lambda self, x: F.linear(x * SCALES, W) + F.linear(x * SCALES.flip(0), W))
    x = rows()
    _, after, factors = smoothed(model, x)
    first, second = factors.values()
    assert first is second
    assert set(first.topk(2).indices.tolist()) == {5, SIZE - 1 - 5}
    assert len(matrices(after)) == 1
    assert close(after, model, x)


def test_values_are_together_where_a_third_one_shares_weights_with_both():
    weights = [torch.randn(8, SIZE, generator=seeded(seed)) for seed in range(3)]

    def forward(self, x):
        a, b, c = (value * SCALES for value in (x, x.sin(), x.cos()))
        return F.linear(a, weights[0]), F.linear(b, weights[1]), F.linear(c, weights[0]), F.linear(c, weights[1])

    _, after, factors = smoothed(Net(forward), rows())
    assert len(factors) == 3
    assert len({id(shared) for shared in factors.values()}) == 1
    assert len(matrices(after)) == 2


def test_values_without_a_weight_in_common_have_factors_of_their_own():
    other = torch.randn(8, SIZE, generator=seeded(2))
    model = Net(lambda self, x: F.linear(x * SCALES, W) + F.linear(x * SCALES.flip(0), other))
    _, _, factors = smoothed(model, rows())
    assert [int(found.argmax()) for found in factors.values()] == [5, SIZE - 1 - 5]


def test_a_value_that_is_not_finite_does_not_keep_others_with_its_weight_from_factors():
    def forward(self, x):
        return F.linear(x * SCALES, W) + F.linear(x * SCALES / 0.0, W)

    _, after, factors = smoothed(Net(forward), rows())
    assert len(factors) == 1
    assert len(matrices(after)) == 2, "the weight as it was, too"


def test_a_layer_in_front_of_different_layers_is_not_copied():
    """Divided by the factors of each of them, it would be there twice."""
    model = two_layers(nn.ReLU())
    others = [torch.randn(8, SIZE, generator=seeded(seed)) for seed in (2, 3)]
    others[1][:, 7] *= 100  # so that its factors are others

    def forward(self, x):
        return F.linear(model[0](x).relu(), others[0]), F.linear(model[0](x.sin()).relu(), others[1])

    x = rows()
    before, after, factors = smoothed(Net(forward), x)
    assert len({id(found) for found in factors.values()}) == 2
    assert len(matrices(after)) == 3
    assert len(list(after.calls())) == len(list(before.calls())) + 2
    with torch.no_grad():
        for found, wanted in zip(after.module()(x), forward(None, x), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_layer_whose_weight_is_read_elsewhere_is_not_divided():
    model, x = two_layers(nn.ReLU()), rows()
    net = Net(lambda self, x: (model(x), model[0].weight.sum()))
    before, after, factors = smoothed(net, x)
    assert len(factors) == 1
    assert len(matrices(after)) == 2
    assert len(list(after.calls())) == len(list(before.calls())) + 1


def test_layers_that_are_not_named_keep_their_input():
    model, x = Normed().eval(), rows()
    program = tsopt.transform(tsopt.capture(model, x))
    left, right = layers_of(program)
    factors = factors_for(program, [left], [(x,)], largest=127, progress=lambda text: None)
    made, _ = run(program, (Smooth(factors, frozenset({left.name})),), Limits())
    after = {layer.name: ops.bind(layer)["input"] for layer in layers_of(made)}
    assert after[left.name].target is ops.aten.mul.Tensor
    assert after[right.name].target is not ops.aten.mul.Tensor
    assert close(made, model, x)


def test_layers_that_read_one_value_are_one_group():
    program = tsopt.capture(Normed().eval(), rows())
    assert [len(layers) for layers in readers(layers_of(program)).values()] == [2]
    deep = tsopt.capture(mlp(8, 8, 8), torch.ones(1, 8))
    assert [len(layers) for layers in readers(layers_of(deep)).values()] == [1, 1]


@pytest.mark.parametrize("kind", ["a bias of two axes", "a weight of one row", "a bias for all"])
def test_a_layer_that_broadcasts_is_divided_after_it(kind):
    weight = torch.randn(SIZE, SIZE, generator=seeded(2))
    weight[5] = 60 * weight[5].sign()
    bias = torch.randn(1 if kind == "a bias for all" else SIZE, generator=seeded(3))

    def forward(self, x):
        if kind == "a weight of one row":
            y = F.linear(x[..., None] * weight, weight[0]) * SCALES
        else:
            y = F.linear(x, weight, bias[None] if kind == "a bias of two axes" else bias)
        return F.linear(y.relu(), W)

    model, x = Net(forward), rows()[:, None] if kind == "a weight of one row" else rows()
    _, after, factors = smoothed(model, x)
    assert len(factors) == 1
    assert close(after, model, x)


def test_a_call_without_rows_says_nothing():
    model, x = two_layers(nn.ReLU()), rows()
    program = tsopt.transform(tsopt.capture(model, x))
    found, wanted = (
        factors_for(program, layers_of(program), calls, largest=127, progress=lambda text: None)
        for calls in ([(x,), (x[:0],)], [(x,), (x,)])
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_channel_that_was_always_zero_may_be_as_large_as_the_others():
    def forward(self, x):
        return F.linear(x * SCALES, W * 1e-3)

    x = rows()
    x[:, 7] = 0
    _, after, factors = smoothed(Net(forward), x)
    (factor,) = factors.values()
    largest = float((x * SCALES / factor).abs().max())
    assert float(300 / factor[7]) < 3 * largest
    assert close(after, Net(forward), x)
