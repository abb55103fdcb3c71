"""What a call looks like: its objects, tensors, types, and what it changes."""
