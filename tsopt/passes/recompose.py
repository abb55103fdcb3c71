"""User-written formulas back into the one op that every backend has a kernel for. All ROUNDING.

Goes before algebra, which would rewrite the powers that a formula is known by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tsopt.compiler.ops import aten
from tsopt.compiler.program import Numerics
from tsopt.compiler.rewrite import rule

OTHER_CONSTANTS = "the constants are not those of GELU"
CUBES: tuple[Callable[[Any], Any], ...] = (
    lambda x: aten.pow.Tensor_Scalar(x, 3.0),
    lambda x: aten.pow.Tensor_Scalar(x, 3),
    lambda x: aten.mul.Tensor(aten.mul.Tensor(x, x), x),
)


def _halved(inner: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The ways to write `0.5 * x * (1 + inner)`; h is the half, one the one."""
    return [
        lambda x, h, one, k, c: aten.mul.Tensor(aten.mul.Tensor(x, h), aten.add.Tensor(inner(x, k, c), one)),
        lambda x, h, one, k, c: aten.mul.Tensor(aten.mul.Tensor(x, aten.add.Tensor(inner(x, k, c), one)), h),
        lambda x, h, one, k, c: aten.mul.Tensor(aten.add.Tensor(inner(x, k, c), one), aten.mul.Tensor(x, h)),
    ]


def _tanh(cube: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, k, c: aten.tanh.default(aten.mul.Tensor(aten.add.Tensor(x, aten.mul.Tensor(cube(x), c)), k))


def _near(value: object, wanted: float) -> bool:
    return type(value) in (int, float) and math.isclose(float(str(value)), wanted, rel_tol=1e-6)


@rule(*(form for cube in CUBES for form in _halved(_tanh(cube))), numerics=Numerics.ROUNDING)
def gelu_tanh(at, x, h, one, k, c):
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) -> gelu(x, approximate="tanh")"""
    if not (_near(h, 0.5) and _near(one, 1) and _near(k, math.sqrt(2 / math.pi)) and _near(c, 0.044715)):
        return at.skip(OTHER_CONSTANTS)
    return at.call(aten.gelu.default, x, approximate="tanh")


@rule(*_halved(lambda x, k, c: aten.erf.default(aten.div.Tensor(x, k))), numerics=Numerics.ROUNDING)
def gelu_erf_div(at, x, h, one, k, c):
    """0.5 * x * (1 + erf(x / sqrt(2))) -> gelu(x)"""
    if not (_near(h, 0.5) and _near(one, 1) and _near(k, math.sqrt(2))):
        return at.skip(OTHER_CONSTANTS)
    return at.call(aten.gelu.default, x)


@rule(*_halved(lambda x, k, c: aten.erf.default(aten.mul.Tensor(x, k))), numerics=Numerics.ROUNDING)
def gelu_erf_mul(at, x, h, one, k, c):
    """0.5 * x * (1 + erf(x * sqrt(0.5))) -> gelu(x)"""
    if not (_near(h, 0.5) and _near(one, 1) and _near(k, math.sqrt(0.5))):
        return at.skip(OTHER_CONSTANTS)
    return at.call(aten.gelu.default, x)


RULES = (gelu_tanh, gelu_erf_div, gelu_erf_mul)
