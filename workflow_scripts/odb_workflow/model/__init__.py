"""Models: the embedded one, loading and freezing of any, and their forward passes."""
