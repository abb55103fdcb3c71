"""The structure of a call: its objects, tensors, types and side effects."""
