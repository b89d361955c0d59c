"""Errors meant for the user, and the wrapper that prints them."""

from __future__ import annotations

import errno
import logging
import signal
import sys
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

EXIT_USER_ERROR = 1
EXIT_UNEXPECTED = 2
_WRITABLE = "choose a folder that can be written, or change its permissions"
_SYSTEM_FIXES = {
    errno.ENOSPC: "free space there, or choose a folder on another disk; then run the same command again",
    errno.EDQUOT: "free space within the quota, or choose a folder on another disk",
    errno.EROFS: _WRITABLE,
    errno.EACCES: _WRITABLE,
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
"""What to do about faults of the machine that can meet any read or write."""


class UserError(Exception):
    """A fault the user can mend: what is wrong, where, and how to mend it.

    Args:
        what: One sentence that names the fault and the offending value.
        where: File, record id or config key; shown on its own line.
        fix: What to do; shown on its own line.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if fix:
            lines.append(f"  fix:   {fix}")
        super().__init__("\n".join(lines))


def combine_errors(errors: Sequence[UserError | str], headline: str) -> UserError:
    """Many faults found in one pass, as one error that lists them all."""
    return UserError("\n".join([headline, *(f"- {error}" for error in errors)]))


def _fault_of_machine(error: OSError) -> UserError | None:
    fix = _SYSTEM_FIXES.get(error.errno or 0)
    return UserError(error.strerror or str(error), where=error.filename, fix=fix) if fix else None


def run_main(main: Callable[[], int | None]) -> None:
    """Run a program's ``main`` and exit: 0 done, 1 a fault of the input, 2 a fault of ours.

    User errors, a full disk and the like are printed without a traceback; anything else is logged with one,
    so that the rule's log holds it. SIGTERM becomes an exit, so that half-written files are removed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        status = main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and (told := _fault_of_machine(error)):
            print(f"error: {told}", file=sys.stderr, flush=True)
            sys.exit(EXIT_USER_ERROR)
        logger.exception("unexpected error")
        sys.exit(EXIT_UNEXPECTED)
    sys.exit(status)
