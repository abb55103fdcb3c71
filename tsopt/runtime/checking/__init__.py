"""Whether a candidate computes what the model does: inputs, comparisons, the verdict."""
