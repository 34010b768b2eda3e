"""What one InferenceService needs: pods, rollout, drain, children, status. Pure."""
