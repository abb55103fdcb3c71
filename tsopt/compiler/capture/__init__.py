"""Captures a model as a Program, or explains why that is not possible."""
