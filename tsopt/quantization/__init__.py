"""int8 and int4 variants of a program: calibrated, and as much of it quantized as a criterion of accuracy accepts."""
