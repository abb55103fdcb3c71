"""Models that are quantized in tests, and what was made of them."""

from __future__ import annotations

import math

import torch

import tsopt
from tests.passes.quantize.models import mlp, seeded
from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph.quantized import quantized_layer
from tsopt.quantization.quantize import Int8Options, quantize

BOTH = ("int8", "int8-static")


def quantized(model, example, *, wanted=BOTH, progress=None, seconds=math.inf, cache=False, **options):
    program = tsopt.transform(tsopt.capture(model, example))
    tell = progress or (lambda text: None)
    made = Int8Options(**options)
    return quantize(model, program, as_example(example), wanted, made, seconds=seconds, cache=cache, progress=tell)


def records(found, variant="int8-static"):
    return found.layers_in(variant)


def layers(program):
    return [layer for node in program.calls() if (layer := quantized_layer(program, node)) is not None]


def hard():
    """A network of which one layer loses much in int8: two weights of each row are much larger than the others.

    They are in other columns in each row, so that no factors of columns help, and cancel out.
    """
    model = mlp(32, 32, 32, 32, 8)
    with torch.no_grad():
        for row in range(32):
            first = 2 * (row % 16)
            model[4].weight[row, first], model[4].weight[row, first + 1] = 300.0, -300.0
        model[2].weight[1::2], model[2].bias[1::2] = model[2].weight[::2], model[2].bias[::2]
    return model


def rows(count, size=32):
    return [torch.randn(1, size, generator=seeded(i)) for i in range(count)]
