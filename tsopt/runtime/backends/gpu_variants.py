"""Forms of a program that compute the same, for which the libraries of a GPU have different kernels.

Which of them is the fastest depends on every size and on the GPU, and no rule predicts it: in float32 at batch 1, on an
H200, a ViT-B/16 takes 3.34 ms with its weights as they are and 2.79 ms transposed, and BERT 2.44 and 2.57 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.eager import laid_out

CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input, aten.convolution.default)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a program is given to torch.

    channels_last: weights of convolutions in the memory format channels_last (NHWC), as the kernels of cuDNN for tensor
        cores read them; activations follow.
    transposed: weights of linear layers with a row for each input feature, instead of one for each output feature.
    separate_bias: biases of linear layers added by a kernel of their own. The product is then computed by cuBLAS, and
        not by cuBLASLt.
    """

    channels_last: bool = False
    transposed: bool = False
    separate_bias: bool = False


NOTES = {
    "channels_last": "convolutions in channels_last",
    "transposed": "weights of linear layers transposed in memory",
    "separate_bias": "biases of linear layers added separately",
}


class _Product(NamedTuple):
    """The arguments of a product with a bias, and the op without one."""

    factors: tuple[str, str]
    bias: str
    plain: Any


PRODUCTS: dict[Any, _Product] = {
    aten.linear.default: _Product(("input", "weight"), "bias", aten.linear.default),
    aten.addmm.default: _Product(("mat1", "mat2"), "self", aten.mm.default),
}
TOGETHER = (("channels_last",), ("transposed", "separate_bias"))  # what has to be tried in all combinations


def applicable(program: Program) -> dict[str, bool]:
    """For each property of a variant, whether the program has operators that it is about."""
    return {
        "channels_last": any(map(_is_of_images, program.calls()))
        and not any(node.target in ops.BY_STRIDES for node in program.calls()),
        "transposed": bool(_matrices(program)),
        "separate_bias": any(map(_adds_bias, program.calls())),
    }


def combinations(variant: Variant, keys: Sequence[str]) -> list[Variant]:
    """The variants that differ from this one in some of these properties."""
    values = (dict(zip(keys, found, strict=True)) for found in product((False, True), repeat=len(keys)))
    return [made for made in (replace(variant, **found) for found in values) if made != variant]


def function_of(program: Program, variant: Variant) -> Callable[..., Sequence[torch.Tensor]]:
    """The program's function of tensors, in a variant; results lie in memory as the program's do."""
    if variant == Variant():
        return program.module().forward  # type: ignore[no-any-return]
    made = program.copy()
    if variant.channels_last:
        for node in filter(_is_of_images, program.calls()):
            name = str(ops.bind(node)["weight"].target)
            made.weights[name] = program.weights[name].detach().contiguous(memory_format=torch.channels_last)
    if variant.transposed:
        for name in _matrices(program):
            made.weights[name] = program.weights[name].detach().t().contiguous().t()
    if variant.separate_bias:
        for node in list(filter(_adds_bias, made.calls())):
            _separate_bias(made.graph, node)
    forward = made.module().forward
    strides = [None if item.type.contiguous else item.type.stride for item in program.signature.outputs]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        return [laid_out(value, stride) for value, stride in zip(forward(*values), strides, strict=True)]

    return run


def _is_of_images(node: fx.Node) -> bool:
    """Whether it is a convolution whose memory format is free."""
    if node.target not in CONVOLUTIONS:
        return False
    weight = ops.bind(node)["weight"]
    return weight.op == "get_attr" and weight.meta["val"].dim() == 4


def _matrices(program: Program) -> list[str]:
    """The weights that nothing but linear layers reads."""
    found = []
    for weight in program.graph.find_nodes(op="get_attr"):
        users = [node for node in weight.users if node.target is aten.linear.default]
        if users and len(users) == len(weight.users) and all(ops.bind(node)["weight"] is weight for node in users):
            found.append(str(weight.target))
    return found


def _adds_bias(node: fx.Node) -> bool:
    """Whether it is a product to which a bias is added in full precision; in half, the sum would be rounded twice."""
    if node.target not in PRODUCTS or node.meta["val"].dtype not in (torch.float32, torch.float64):
        return False
    given = ops.bind(node)
    bias = given[PRODUCTS[node.target].bias]
    return (
        isinstance(bias, fx.Node) and bias.meta["val"].dim() == 1 and given.get("alpha", 1) == given.get("beta", 1) == 1
    )


def _separate_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Splits a product with a bias into a product and a sum."""
    given, product_of = ops.bind(node), PRODUCTS[node.target]
    with graph.inserting_before(node):
        plain = graph.call_function(product_of.plain, tuple(given[key] for key in product_of.factors))
        total = graph.call_function(aten.add.Tensor, (plain, given[product_of.bias]))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
