"""Scores of attention on 8-bit integers: the products of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tsopt.compiler.analysis.integer_sums import scores_fit
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import QParams, quantize_value
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of, read_operands
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass


@dataclass(frozen=True, slots=True, eq=False)
class ScoresInInt8(Pass):
    """Queries and keys of attention on signed 8-bit integers, with a scale for the whole tensor. LOSSY.

    Softmax and its product with the values stay in float32: probabilities would lose most of what is small among them.
    OpenVINO runs attention in one kernel only if the integers are symmetric.

    Attributes:
        qparams: of queries and keys, symmetric, by the names of their nodes.
        only: the names of the calls of attention.
    """

    name = "int8-scores"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    qparams: Mapping[str, QParams]
    only: frozenset[str]

    def run(self, program: Program, limits: Limits) -> Changes:
        rounded: dict[fx.Node, fx.Node] = {}
        done = []
        for node in attentions_of(program):
            operands = operands_of(node)
            known = all(operand.name in self.qparams for operand in operands)
            known = known and scores_fit(int(operands[0].meta["val"].shape[-1]))
            if node.name not in self.only or not known or not limits.take():
                continue
            for operand in operands:
                if operand not in rounded:
                    rounded[operand] = quantize_value(program, operand, self.qparams[operand.name])
            read_operands(node, [rounded[operand] for operand in operands])
            done.append(Done("quantize_scores", origin_of(node)))
        return Changes(tuple(done), numerics=Numerics.LOSSY if done else Numerics.EXACT)
