"""The controller: queue, reconciler, executor, resync; independent of the kinds that it reconciles."""
