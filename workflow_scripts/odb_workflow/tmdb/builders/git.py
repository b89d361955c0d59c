"""The few git commands that a checkout needs: never a prompt, never a password in a file or a log."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from ...runtime.errors import UserError

logger = logging.getLogger(__name__)

NETWORK_ATTEMPTS = 4
# What git says where a second attempt can help; a refused ref or a missing repository is final.
_PASSING_FAULT = re.compile(
    r"could not resolve host|timed? ?out|connection (was )?(reset|refused)|early eof|unexpected disconnect"
    r"|network is unreachable|http 5\d\d|returned error: (429|5\d\d)|failed to connect|ssl_|gnutls"
    r"|remote end hung",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def without_credentials(text: str) -> str:
    """The same text with user and password taken out of every URL."""
    return _CREDENTIALS.sub("", text)


def split_credentials(url: str) -> tuple[str, str | None]:
    """``(URL without user and password, the whole URL)``; the second is None where there were none."""
    clean = without_credentials(url)
    return (clean, None) if clean == url or url.startswith("ssh://") else (clean, url)


class Git:
    """Git in one work tree.

    Args:
        folder: The work tree.
        url: Repository that is cloned and fetched; None where the network is not used.
    """

    def __init__(self, folder: Path, url: str | None) -> None:
        self.folder = folder
        self.url = url

    def clone(self) -> None:
        """Clone into the empty folder, without files.

        Raises:
            UserError: the repository cannot be read.
        """
        self._network(["clone", "--quiet", "--no-checkout", "--", self._clean_url, str(self.folder)], at=None)

    def fetch(self) -> None:
        """Fetch branches and tags as the repository has them now.

        Raises:
            UserError: the repository cannot be read.
        """
        self._network(["fetch", "--quiet", "--tags", "--prune", "--force", "origin"], at=self.folder)
        self._run(["remote", "set-head", "origin", "--auto"], self.folder)

    def check_out(self, commit: str) -> None:
        """Put the files of ``commit`` into the work tree."""
        done = self._run(["checkout", "--quiet", "--force", "--detach", commit], self.folder)
        if done.returncode:
            raise UserError(
                f"git checkout failed: {without_credentials(done.stderr.strip())}", where=str(self.folder)
            )

    def resolve(self, name: str) -> str | None:
        """Full commit that a name stands for; None where it stands for none."""
        done = self._run(["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], self.folder)
        return done.stdout.strip() if done.returncode == 0 else None

    def changed(self) -> bool:
        """Whether tracked files differ from the commit that is checked out."""
        return bool(self._run(["status", "--porcelain", "--untracked-files=no"], self.folder).stdout.strip())

    def names(self) -> list[str]:
        """Branches of the remote and tags."""
        branches = self._run(
            ["for-each-ref", "--format=%(refname:lstrip=3)", "refs/remotes/origin"], self.folder
        )
        tags = self._run(["tag", "--list"], self.folder)
        return sorted({*branches.stdout.split(), *tags.stdout.split()} - {"HEAD"})

    @property
    def _clean_url(self) -> str:
        return split_credentials(self.url or "")[0]

    def _run(self, arguments: list[str], at: Path | None) -> subprocess.CompletedProcess[str]:
        # a job has nobody to answer a prompt
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}
        environment.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
        clean, whole = split_credentials(self.url or "")
        if whole:
            # git would write the URL with its password into .git/config; so it is put in on the way out only
            count = int(environment.get("GIT_CONFIG_COUNT", "0"))
            environment |= {
                "GIT_CONFIG_COUNT": str(count + 1),
                f"GIT_CONFIG_KEY_{count}": f"url.{whole}.insteadOf",
                f"GIT_CONFIG_VALUE_{count}": clean,
            }
        command = ["git", *(["-C", str(at)] if at is not None else []), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
        )

    def _network(self, arguments: list[str], at: Path | None) -> None:
        wait = float(os.environ.get("ODB_WORKFLOW_RETRY_SECONDS", "2"))
        message = ""
        for attempt in range(1, NETWORK_ATTEMPTS + 1):
            done = self._run(arguments, at)
            if done.returncode == 0:
                return
            message = without_credentials(done.stderr.strip())
            if attempt == NETWORK_ATTEMPTS or not _PASSING_FAULT.search(message):
                break
            logger.warning(
                "git %s failed (%s); attempt %d of %d", arguments[0], message, attempt + 1, NETWORK_ATTEMPTS
            )
            time.sleep(wait * 2 ** (attempt - 1))
            if arguments[0] == "clone":  # a clone that broke off must not stand in the way of the next
                for item in self.folder.iterdir():
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        raise UserError(
            f"git {arguments[0]} failed: {message}",
            where=self._clean_url,
            fix="check builder.repo; without network set it to a mirror, a local path or a git bundle "
            "(git bundle create builder.bundle --all)",
        )
