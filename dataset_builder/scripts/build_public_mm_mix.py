#!/usr/bin/env python3
"""Build the embedded MM-Mix-like TMDB: ``build_public_mm_mix.py --output DIR --overwrite``."""

from __future__ import annotations

import sys
from pathlib import Path

# The script also runs from a plain checkout, without `pip install -e .`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from odb_mm_mix.cli import main

if __name__ == "__main__":
    sys.exit(main())
