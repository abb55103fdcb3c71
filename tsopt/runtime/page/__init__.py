"""Pages for a browser: complete in themselves, and safe whatever a model's names hold."""
