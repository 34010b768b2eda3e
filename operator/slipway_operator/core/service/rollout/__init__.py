"""How one revision replaces another: revisions, gates, canary, counts and weights. Pure."""
