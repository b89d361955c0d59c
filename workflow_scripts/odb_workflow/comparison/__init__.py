"""Comparison of finished runs: collect, test, draw, write. Nothing here trains or evaluates."""
