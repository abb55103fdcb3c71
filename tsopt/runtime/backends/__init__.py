"""What backends are, which there are, and those of torch."""
