"""Recomposes handwritten formulas into the single op that every backend has a kernel for. All ROUNDING.

The rules are in `activations`, `norms`, `attention` and `linear`; the other files are helpers that query the graph and
create calls.
"""

from __future__ import annotations

from tsopt.passes.recompose import activations, attention, linear, norms

RULES = (*activations.RULES, *norms.RULES, *attention.RULES, *linear.RULES)
