"""The precisions in which float32 matrix products may be computed, by name."""

from __future__ import annotations

FP32 = "fp32"  # every value in the dtype that the model gives it
HALVES = ("bf16", "fp16")
INT8 = "int8"  # dynamic quantization: each call computes the activation scales
INT8_STATIC = "int8-static"  # static quantization: the scales come from calibration
INT8_WEIGHTS = "int8-weights"  # int8 weights of linear layers: engines round their inputs in groups, in each call
INT4 = "int4"  # the same with weights in 4 bits where that is accurate enough, and int8 weights elsewhere
INTEGER_VARIANTS = (INT8, INT8_WEIGHTS, INT8_STATIC, INT4)
PRECISIONS = (FP32, "tf32", *HALVES, INT8, INT4)
