"""Quantization: products of float values that are computed on 8-bit integers."""
