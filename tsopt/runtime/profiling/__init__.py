"""Where the time of a call goes: by layer, in each engine."""
