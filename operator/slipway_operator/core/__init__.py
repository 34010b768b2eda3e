"""The operator's decisions. Pure: no I/O, no clock, no randomness, no logging."""
