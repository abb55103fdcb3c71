"""Forms of a program for which the libraries of a GPU have different kernels.

Which of them is the fastest depends on every size and on the GPU, and no rule predicts it: in float32 at batch 1, on an
H200, a ViT-B/16 takes 3.34 ms with its weights as they are and 2.79 ms transposed, and BERT 2.44 and 2.57 ms; a
ResNet-50 takes 0.88 ms, 0.71 in channels_last, 0.85 fused, and 0.53 with both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_weight
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.eager import laid_out
from tsopt.runtime.backends.layer_sites import Site, each, site_of

CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input, aten.convolution.default)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a program is given to torch.

    channels_last: weights of convolutions in the memory format channels_last (NHWC), as the kernels of cuDNN for tensor
        cores read them; activations follow.
    fused: convolutions that add their bias and a residual sum and apply their ReLU themselves.
    transposed: weights of linear layers with a row for each input feature, instead of one for each output feature.
    separate_bias: biases of linear layers added by a kernel of their own. The product is then computed by cuBLAS, and
        not by cuBLASLt.
    """

    channels_last: bool = False
    fused: bool = False
    transposed: bool = False
    separate_bias: bool = False


NOTES = {
    "channels_last": "convolutions in channels_last",
    "fused": "convolutions fused with the ReLU that follows them, which may turn NaN into 0",
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
TOGETHER = (("channels_last", "fused"), ("transposed", "separate_bias"))  # what has to be tried in all combinations


def applicable(program: Program) -> dict[str, bool]:
    """For each property of a variant, whether the program has operators that it is about."""
    return {
        "channels_last": any(map(_is_of_images, program.calls()))
        and not any(node.target in ops.BY_STRIDES for node in program.calls()),
        "fused": _is_free() and any(map(_fusible, program.calls())),
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
    if variant.fused:
        for node in list(made.calls()):
            if site := _fusible(node):
                _fuse(made.graph, site)
    if variant.transposed:
        for weight in _matrices(made):
            _transpose(made, weight)
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


def _is_free() -> bool:
    """Whether cuDNN may choose any kernel: the calls that fuse heed no settings of the user's."""
    cudnn = torch.backends.cudnn
    return cudnn.enabled and not cudnn.deterministic and not torch.are_deterministic_algorithms_enabled()


def _fusible(node: fx.Node) -> Site | None:
    """A convolution with a ReLU after it, and what is added in between."""
    if node.target is not aten.conv2d.default or node.meta["val"].dim() != 4:
        return None
    given = ops.bind(node)
    if given["groups"] > 1 and given["weight"].meta["val"].shape[1] == 1:
        return None  # torch has kernels of its own for these
    site = site_of(node)
    kind, ends, _ = site.activation
    return site if kind == "relu" or (kind == "hardtanh" and ends[0] == 0) else None


def _fuse(graph: fx.Graph, site: Site) -> None:
    """Replaces a convolution, a residual sum and a ReLU with one call of cuDNN."""
    given = ops.bind(site.layer)
    image = (given["input"], given["weight"])
    how = (given["bias"], *(each(given[key], 2) for key in ("stride", "padding", "dilation")), given["groups"])
    with graph.inserting_before(site.end):
        if site.other is None:
            made = graph.call_function(aten.cudnn_convolution_relu.default, (*image, *how))
        else:
            made = graph.call_function(aten.cudnn_convolution_add_relu.default, (*image, site.other, 1.0, *how))
        if ends := site.activation[1]:
            made = graph.call_function(aten.clamp_max.default, (made, ends[1]))
    made.meta = dict(site.end.meta)
    site.end.replace_all_uses_with(made)
    for node in reversed(site.chain):
        graph.erase_node(node)


def _matrices(program: Program) -> list[fx.Node]:
    """The weights of linear layers."""
    return [
        weight for weight in program.graph.find_nodes(op="get_attr") if any(map(_is_weight_of(weight), weight.users))
    ]


def _is_weight_of(weight: fx.Node) -> Callable[[fx.Node], bool]:
    """Whether a call is a linear layer with this weight, and reads it as nothing else."""
    return lambda node: (
        node.target is aten.linear.default
        and ops.bind(node)["weight"] is weight
        and ops.bind(node)["input"] is not weight
    )


def _transpose(program: Program, weight: fx.Node) -> None:
    """Has linear layers read a weight from a copy that lies in memory the other way round, and others as it is."""
    layers = list(filter(_is_weight_of(weight), weight.users))
    value = program.weights[str(weight.target)].detach().t().contiguous().t()
    copy = new_weight(program, weight, fresh_name(f"{weight.target}.transposed", program.weights), value)
    for node in layers:
        node.replace_input_with(weight, copy)
    if not weight.users:
        program.graph.erase_node(weight)


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
