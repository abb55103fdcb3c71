"""Machinery: the Program, capture, rules, pipeline, verifier. Knows no particular pass and no backend."""
