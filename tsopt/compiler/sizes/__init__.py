"""Dynamic dimensions: sizes that differ from call to call."""
