"""Merges branches that differ only in weights and inputs, and linear layers that share an input."""

from __future__ import annotations

from tsopt.passes.merge.merger import MergeBranches

__all__ = ["MergeBranches"]
