"""`-hf ORG/REPO[:QUANT]`: choice and download of a Hugging Face repository's files.

The choice is llama.cpp's: QUANT in any case, by default Q4_K_M or else the first GGUF;
all parts of a split model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ..errors import ModelError, OptionError
from .model_index import SplitName

DEFAULT_QUANT = "Q4_K_M"

_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?=[-./]|$)", re.IGNORECASE
)


def parse_repository(spec: str) -> tuple[str, str | None]:
    """Split "ORG/REPO[:QUANT]" into repository and quant, or raise OptionError."""
    repo, _, quant = spec.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or (":" in spec and not quant):
        raise OptionError(f"-hf: expected ORG/REPO or ORG/REPO:QUANT, got {spec!r}")
    return repo, quant or None


def quant_of(file: str) -> str | None:
    """Return the quant in a file's name, in capitals."""
    match = _QUANT.search(file)
    return match and match.group(1).upper()


def choose_files(files: Iterable[str], quant: str | None = None) -> list[str]:
    """Choose the files to fetch, the one to load first, or raise ModelError."""
    models = sorted(
        f
        for f in files
        if f.lower().endswith(".gguf")
        and not re.search("mmproj|imatrix", os.path.basename(f).lower())
    )
    if not models:
        raise ModelError("the repository has no GGUF file")
    of_quant = [
        f
        for f in models
        if re.search(
            rf"(?:^|[-._/]){re.escape(quant or DEFAULT_QUANT)}(?=[-./]|$)", f, re.IGNORECASE
        )
    ]
    if not of_quant and quant:
        quants = sorted({name for f in models if (name := quant_of(f))})
        raise ModelError(f"the repository has no {quant}; it has {', '.join(quants or models)}")
    first = (of_quant or models)[0]
    split = SplitName.parse(first)
    if not split:
        return [first]
    parts = [part for part in split.parts if part in models]
    if len(parts) != split.count:
        raise ModelError(
            f"the repository has {len(parts)} of the {split.count} parts of {split.stem}"
        )
    return parts


def download(spec: str) -> str:
    """Fetch a model unless it is cached, and return the path of its first file.

    Raises:
        OptionError: huggingface_hub is not installed, or the option is malformed.
        ModelError: The repository or file does not exist or cannot be reached.
    """
    repo, quant = parse_repository(spec)
    try:
        import huggingface_hub
    except ImportError:
        raise OptionError("-hf needs huggingface_hub: pip install 'moeoff[hub]'") from None
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # logs retries
    try:
        # list_repo_files retries for half a minute without a network
        files = [
            sibling.rfilename
            for sibling in huggingface_hub.HfApi().model_info(repo, timeout=10).siblings or ()
        ]
    except Exception as error:  # its type depends on version and transport
        return _cached(huggingface_hub, repo, quant, error)
    try:
        chosen = choose_files(files, quant)
    except ModelError as error:
        raise ModelError(f"-hf {repo}: {error}") from None
    try:
        return [huggingface_hub.hf_hub_download(repo, file) for file in chosen][0]
    except Exception as error:
        raise ModelError(f"-hf {repo}: cannot be downloaded: {_first_line(error)}") from None


def _cached(huggingface_hub: ModuleType, repo: str, quant: str | None, reason: Exception) -> str:
    """Return the path of the first file that an earlier run downloaded."""
    try:
        folder = huggingface_hub.snapshot_download(repo, local_files_only=True)
        files = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")]
        return os.path.join(folder, choose_files(files, quant)[0])
    except Exception:
        why = f"cannot be reached, and is not in the cache: {_first_line(reason)}"
        raise ModelError(f"-hf {repo}: {why}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip()
