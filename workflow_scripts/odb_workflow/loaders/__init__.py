"""From lengths to batches: one loader per kind, each emitting every sample of an epoch once."""
