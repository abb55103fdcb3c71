"""What is known of the values of a Program without running it: ranges, NaN and infinities, memory."""
