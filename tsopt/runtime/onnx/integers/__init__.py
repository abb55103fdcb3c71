"""Integers that an engine computes in fewer bits than PyTorch, and the calls that it must therefore not serve."""
