"""Plans one LoRAAdapter: which replicas load it, in which order, and its status. Pure."""
