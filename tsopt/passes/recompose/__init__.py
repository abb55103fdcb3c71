"""Formulas that users write out, back into the one op that every backend has a kernel for. All ROUNDING.

Rules in `activations`, `norms`, `attention` and `linear`; the other files are what those ask of a graph, and how they
make calls.
"""

from __future__ import annotations

from tsopt.passes.recompose import activations, attention, linear, norms

RULES = (*activations.RULES, *norms.RULES, *attention.RULES, *linear.RULES)
