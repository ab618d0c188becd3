"""Where small files about a model go when nothing can be written beside it: the user's cache folder, named after the model's path, size and time of change."""

from __future__ import annotations

import os

from ..gguf.layout import Layout
from ..paths import cache_folder


def cached_path(layout: Layout, kind: str, suffix: str) -> str | None:
    """CACHE/kind/IDENTITY.suffix; None if there is no cache folder. The folder may be missing."""
    try:
        return str(cache_folder() / kind / f"{layout.identity}.{suffix}")
    except OSError:
        return None


def existing_path(beside: str, layout: Layout, kind: str, suffix: str) -> str | None:
    """`beside` or else the cached path, whichever is there; None if neither is."""
    return next((path for path in (beside, cached_path(layout, kind, suffix)) if path is not None and os.path.exists(path)), None)


def writable_path(beside: str, layout: Layout, kind: str, suffix: str) -> str:
    """`beside`, if its folder can be written to; else the cached path, whose folder is made.

    Raises:
        OSError: neither can be written.
    """
    if os.access(os.path.dirname(os.path.abspath(beside)), os.W_OK):
        return beside
    cached = cached_path(layout, kind, suffix)
    if cached is None:
        raise OSError(f"{beside}: its folder cannot be written to, and there is no cache folder")
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    return cached
