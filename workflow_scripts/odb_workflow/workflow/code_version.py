"""The code version of a program, read from its text: a program is never imported to learn it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_LINE = re.compile(r"^CODE_VERSION\s*(?::\s*int\s*)?=\s*(\d+)\s*(?:#.*)?$", re.MULTILINE)


@cache
def code_version(program: Path) -> int:
    """The number in the program's ``CODE_VERSION = N`` line; 0 where there is none.

    A stage reruns when this number is raised; other edits of a program rerun nothing, because a comment or a
    faster
    loop must not cost a training.
    """
    try:
        found = _LINE.search(program.read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found.group(1)) if found else 0
