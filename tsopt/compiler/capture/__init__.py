"""A model as a Program, or why it cannot be one."""
