"""The bundle: what is written, what is read, and what is looked at before."""
