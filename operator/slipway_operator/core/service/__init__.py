"""Plans one InferenceService: pods, rollout, drain, children, status. Pure."""
