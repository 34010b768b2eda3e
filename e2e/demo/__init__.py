"""The demo: Slipway's features one after the other on a local cluster, explained while they run (`make demo`)."""
