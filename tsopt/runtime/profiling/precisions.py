"""In which precision an engine computes each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import QuantizedLayer, calibrated_input, quantized_layers
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of
from tsopt.compiler.precision_names import FP32, INT4, INT8_WEIGHTS
from tsopt.runtime.backends.candidate import BY_ENGINE, Candidate


@dataclass(frozen=True, slots=True)
class Precisions:
    """The precisions of layers.

    Attributes:
        known: by where a layer is in the model.
        others: of all others.
    """

    known: Mapping[str, str] = field(default_factory=dict)
    others: str = FP32

    def of(self, where: str) -> str:
        return self.known.get(where, self.others)


def precisions_of(candidate: Candidate, program: Program) -> Precisions:
    """The precisions in which a candidate computes the layers of its variant of a program."""
    options, others = dict(candidate.options), FP32
    layers: list[QuantizedLayer] = []
    lowered: Iterable[fx.Node]
    for name in BY_ENGINE:
        others = str(options.get(name, others))
    if candidate.variant in ops.HALVES:
        lowered = (node for node in program.calls() if _is_in(node, candidate.variant))
    else:
        scores = (node for node in attentions_of(program) if any(map(calibrated_input, operands_of(node))))
        layers = list(quantized_layers(program))
        lowered = (*(layer.node for layer in layers), *scores)
    found = dict.fromkeys(map(origin_of, lowered), candidate.variant)
    if candidate.variant == INT4:
        found |= {origin_of(layer.node): INT8_WEIGHTS for layer in layers if layer.group is None}
    return Precisions(found, others)


def _is_in(node: fx.Node, precision: str) -> bool:
    return any(tensor.dtype == ops.HALVES[precision] for tensor in ops.tensors_of(node.meta.get("val")))
