"""Ports of a rendezvous."""

from __future__ import annotations

import socket

from ..runtime.errors import UserError


def choose_port(wanted: int) -> int:
    """``wanted`` if it is free, or a free port for 0.

    Raises:
        UserError: the wanted port is in use or not allowed.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # The rendezvous itself sets this too: a port that lingers in TIME_WAIT is free for it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", wanted))
        except OSError as error:
            raise UserError(
                f"port {wanted} cannot be used: {error.strerror}",
                where="training.master_port (ODB_MM_MIX_MASTER_PORT)",
                fix="choose another port, or 0 for a free one",
            ) from None
        return int(probe.getsockname()[1])
