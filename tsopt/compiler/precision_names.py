"""The precisions in which float32 matrix products may be computed, by name."""

from __future__ import annotations

FP32 = "fp32"  # every value in the dtype that the model gives it
HALVES = ("bf16", "fp16")
INT8 = "int8"  # dynamic quantization: each call computes the activation scales
INT8_STATIC = "int8-static"  # static quantization: the scales come from calibration
PRECISIONS = (FP32, "tf32", *HALVES, INT8)
