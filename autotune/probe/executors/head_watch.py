"""Connection to a cluster's head: whether it is lost."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

# Time without a connection after which the head counts as lost: less than Ray's own minute.
LOST_SECONDS = 25.0

NODE_SAMPLE_SECONDS = 2.0

NODE_CONNECT_SECONDS = 2.0


class HeadWatch:
    """Connections to a cluster's head, at most one each INTERVAL_SECONDS. For several threads.
    Ray ends a driver process by itself, without an exception, when the head has been gone for a
    minute (`gcs_rpc_server_reconnect_timeout_s`). The head is therefore watched from here, so
    that the search ends before that, with its answer.
    """

    def __init__(self, address: str, now: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._now = now
        self._tried_at = self._reached_at = now()

    def is_lost(self) -> bool:
        """Return True if no connection succeeded for LOST_SECONDS."""
        now = self._now()
        if now - self._tried_at >= NODE_SAMPLE_SECONDS:
            self.answers()
        return self._now() - self._reached_at > LOST_SECONDS

    def answers(self) -> bool:
        """Return True if a connection succeeds now."""
        self._tried_at = self._now()
        with contextlib.suppress(OSError):
            socket.create_connection(self._place, timeout=NODE_CONNECT_SECONDS).close()
            self._reached_at = self._now()
            return True
        return False

    def wait(self) -> bool:
        """Return True once a connection succeeds; False when the head counts as lost."""
        while not self.is_lost():
            if self._reached_at >= self._tried_at:
                return True
            time.sleep(NODE_SAMPLE_SECONDS / 4)
        return False
