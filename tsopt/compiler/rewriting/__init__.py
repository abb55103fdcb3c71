"""Rules, the driver that applies them, and the pipeline that runs passes."""
