"""Builds a small MM-Mix-like TMDB from data that Python packages ship; deterministic from its seed."""

BUILDER = "embedded-mm-mix"
VERSION = "1.0"
