"""The compiler core: Program, capture, rules, pipeline, verifier. Independent of the passes and the backends."""
