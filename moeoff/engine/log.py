"""What of llama.cpp's log is shown."""

from __future__ import annotations

import logging

# enum ggml_log_level: NONE, DEBUG, INFO, WARN, ERROR, CONT. llama_cpp's own table is older than the order of today:
# it takes warnings for errors and hides errors as debug messages.
_LEVELS = {0: logging.CRITICAL, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR, 5: logging.DEBUG}


def set_log(verbose: bool) -> None:
    """Everything, or errors alone: llama.cpp's warnings ("n_ctx_seq > n_ctx_train") are for its developers."""
    from llama_cpp import _logger

    _logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL.update(_LEVELS)
    _logger.set_verbose(verbose)
