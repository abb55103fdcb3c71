"""The precisions in which float32 matrix products may be computed, by name."""

from __future__ import annotations

FP32 = "fp32"  # every value in the dtype that the model gives it
HALVES = ("bf16", "fp16")
INT8 = "int8"  # layers on 8-bit integers, whose scales each call computes
INT8_STATIC = "int8-static"  # the same with scales that calibration has found
PRECISIONS = (FP32, "tf32", *HALVES, INT8)
