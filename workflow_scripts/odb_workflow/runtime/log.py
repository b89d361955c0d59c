"""One logging set-up for all programs: plain lines on stderr, which the rules send to their log file."""

from __future__ import annotations

import logging
import sys
import time


def setup_logging(level: str = "INFO", *, rank: int = 0) -> None:
    """Send log records to stderr as ``time level message``; ranks other than 0 show warnings only."""
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    formatter.converter = time.localtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if rank == 0 else "WARNING")
    for noisy in ("urllib3", "filelock", "fsspec", "matplotlib", "PIL", "datasets", "odb"):
        logging.getLogger(noisy).setLevel("WARNING")
