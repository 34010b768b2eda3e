"""The model of a service: does it fit, how do pods reach it, which nodes have it. Pure."""
