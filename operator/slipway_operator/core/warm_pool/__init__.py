"""Decides about WarmPools: how many pods wait, which services may claim them, and what a claim changes of a pod."""
