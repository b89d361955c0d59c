"""Shared code of the workflow programs: one room per concern, see docs/how-it-works.md."""
