"""Parts of ``gpu_record.py``: model, synthetic data, training steps, evaluation, whole runs, record."""
