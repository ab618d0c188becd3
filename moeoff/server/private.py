"""`PrivateServer`: a server for one conversation of its own process, as `moeoff run`."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from typing import Any

from ..budget.dry_load import default_ctx
from ..gguf.model_index import ModelIndex
from ..options import Config
from ..system.memory import Budget
from .server import Server
from .sizes import ContextSize


class PrivateServer(Server):
    """A server with one slot on a Unix socket, abstract on Linux.

    The budget does not reduce the context length. Prompts are cached in memory or on
    disk only if requested.

    Args:
        model, **options: Arguments of `Server`, except host, port, parallel and
            api_key.

    Attributes:
        key: Random API key for requests.
    """

    def __init__(self, model: str | os.PathLike[str] | Config, **options: Any):
        self.key = secrets.token_hex()
        name = f"moeoff-{secrets.token_hex(8)}.sock"
        if sys.platform == "linux":
            # llama-server's syntax for abstract names
            self._address, host = f"\0{name}", f"@{name}"
        else:
            self._folder = tempfile.TemporaryDirectory()
            self._address = host = os.path.join(self._folder.name, name)
        self._budget_remarks: list[str] = []
        defaults = {"cache_ram": 0, "kv_disk": 0}
        fixed = {"host": host, "parallel": 1, "api_key": self.key}
        super().__init__(model, on_remark=self._budget_remarks.append, **defaults | options | fixed)

    def take_remarks(self) -> list[str]:
        """Return the remarks on the budget since the last call."""
        remarks, self._budget_remarks[:] = list(self._budget_remarks), []
        return remarks

    def connect(self) -> socket.socket:
        """Connect to the server for one request."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection

    def _choose_context(
        self, config: Config, model_index: ModelIndex, budget: Budget
    ) -> ContextSize:
        return ContextSize(default_ctx(model_index, config.n_ctx), 1)
