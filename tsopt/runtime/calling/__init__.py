"""What the user calls, and what is looked at in a call."""
