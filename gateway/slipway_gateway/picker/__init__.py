"""Which replica gets a request. Pure: no I/O, no clock, no randomness."""
