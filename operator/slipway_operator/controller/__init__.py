"""Queue, reconciler and executor: the machinery that carries plans out."""
