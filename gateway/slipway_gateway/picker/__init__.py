"""Picks the replica that serves a request. Pure: no I/O, no clock."""
