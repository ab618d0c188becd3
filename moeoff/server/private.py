"""`PrivateServer`: a server for the one conversation of a program in the same process, as `moeoff run` is."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from typing import Any

from ..budget.dry_load import usual_ctx
from ..gguf.model_index import ModelIndex
from ..options import Config
from ..system.memory import Budget
from .server import Server
from .sizes import ContextSize


class PrivateServer(Server):
    """A server with one slot, on a Unix socket that takes no place in the file system where the system has such.

    The context is the usual one at every budget. No prompt leaves it, and none is kept on disk
    unless that is asked for. Requests need a key that this object alone has.

    Args:
        model, **options: as of `Server`, without host, port, parallel and api_key.

    Attributes:
        key: of requests.
    """

    def __init__(self, model: str | os.PathLike[str] | Config, **options: Any):
        self.key = secrets.token_hex()
        name = f"moeoff-{secrets.token_hex(8)}.sock"
        if sys.platform == "linux":
            self._address, host = f"\0{name}", f"@{name}"  # as llama-server writes an abstract name
        else:
            self._folder = tempfile.TemporaryDirectory()
            self._address = host = os.path.join(self._folder.name, name)
        self._said: list[str] = []
        keeps = {"cache_ram": 0, "kv_disk": 0}
        fixed = {"host": host, "parallel": 1, "api_key": self.key}
        super().__init__(model, on_remark=self._said.append, **keeps | options | fixed)

    def take_remarks(self) -> list[str]:
        """Return what has been said of the budget since the last call, for the end of an answer."""
        said, self._said[:] = list(self._said), []
        return said

    def connect(self) -> socket.socket:
        """Return a connection for one request."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection

    def _choose_context(self, config: Config, model_index: ModelIndex, budget: Budget) -> ContextSize:
        return ContextSize(usual_ctx(model_index, config.n_ctx), 1)
