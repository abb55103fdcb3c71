"""Several roots at once: branches that differ only in weights and inputs, and linear layers of one input."""

from __future__ import annotations

from tsopt.passes.merge.merger import MergeBranches

__all__ = ["MergeBranches"]
