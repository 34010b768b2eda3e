"""Flux's kustomize-controller, built from its Go module, and a source of manifests for it."""
