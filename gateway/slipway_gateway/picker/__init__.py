"""Which replica serves a request: pure. Views of the fleet come in, one endpoint goes out; no I/O, no clock."""
