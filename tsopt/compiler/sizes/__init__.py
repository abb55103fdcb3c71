"""Sizes that differ from call to call."""
