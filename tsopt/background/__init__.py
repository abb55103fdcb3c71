"""Compilation in another process while eager serves the calls in this one."""
