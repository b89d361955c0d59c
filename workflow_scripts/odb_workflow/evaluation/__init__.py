"""Evaluation of any checkpoint: validation loss and MMMU choice likelihood, batched, on any number of
ranks.
"""
