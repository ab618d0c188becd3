"""`-hf ORG/REPO[:QUANT]`: which files of a Hugging Face repository are meant, and fetching them.

The meaning is llama.cpp's: QUANT in any case, Q4_K_M unless stated, or else the first GGUF; all parts of a split file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from types import ModuleType

from ..errors import ModelError, OptionError
from .model_index import SplitName

DEFAULT_QUANT = "Q4_K_M"

_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?=[-./]|$)", re.IGNORECASE)


def parse(spec: str) -> tuple[str, str | None]:
    """Repository and quant of "ORG/REPO[:QUANT]". Raises `OptionError`."""
    repo, _, quant = spec.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or (":" in spec and not quant):
        raise OptionError(f"-hf: expected ORG/REPO or ORG/REPO:QUANT, not {spec!r}")
    return repo, quant or None


def quant_of(file: str) -> str | None:
    """Return the quant that a file's name tells, in capitals."""
    match = _QUANT.search(file)
    return match and match.group(1).upper()


def choose(files: Iterable[str], quant: str | None = None) -> list[str]:
    """The files to fetch of those a repository has, the one to load first.

    Raises:
        ModelError: there is no GGUF, none of this quant, or a part is missing.
    """
    models = sorted(f for f in files if f.lower().endswith(".gguf") and not re.search("mmproj|imatrix", os.path.basename(f).lower()))
    if not models:
        raise ModelError("the repository has no GGUF file")
    of_quant = [f for f in models if re.search(rf"(?:^|[-._/]){re.escape(quant or DEFAULT_QUANT)}(?=[-./]|$)", f, re.IGNORECASE)]
    if not of_quant and quant:
        quants = sorted({name for f in models if (name := quant_of(f))})
        raise ModelError(f"the repository has no {quant}; there are: {', '.join(quants or models)}")
    first = (of_quant or models)[0]
    split = SplitName.parse(first)
    if not split:
        return [first]
    parts = [part for part in split.parts if part in models]
    if len(parts) != split.count:
        raise ModelError(f"the repository has {len(parts)} of the {split.count} parts of {split.stem}")
    return parts


def download(spec: str) -> str:
    """Fetches a model and returns the path of its first file; what is already in huggingface_hub's cache is not fetched again.

    Raises:
        OptionError: the extra is not installed, or the option is malformed.
        ModelError: the repository or the file does not exist, or cannot be reached.
    """
    repo, quant = parse(spec)
    try:
        import huggingface_hub
    except ImportError:
        raise OptionError("-hf needs huggingface_hub: pip install 'moeoff[hub]'") from None
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would tell of each attempt to connect
    try:
        # not list_repo_files: without a network that tries for half a minute
        files = [sibling.rfilename for sibling in huggingface_hub.HfApi().model_info(repo, timeout=10).siblings or ()]
    except Exception as error:  # what it raises depends on its version and its transport
        return _cached(huggingface_hub, repo, quant, error)
    try:
        chosen = choose(files, quant)
    except ModelError as error:
        raise ModelError(f"-hf {repo}: {error}") from None
    try:
        return [huggingface_hub.hf_hub_download(repo, file) for file in chosen][0]
    except Exception as error:
        raise ModelError(f"-hf {repo}: cannot be downloaded: {_first_line(error)}") from None


def _cached(huggingface_hub: ModuleType, repo: str, quant: str | None, reason: Exception) -> str:
    """Without network: what an earlier run fetched."""
    try:
        folder = huggingface_hub.snapshot_download(repo, local_files_only=True)
        files = [os.path.relpath(os.path.join(path, f), folder).replace(os.sep, "/") for path, _, names in os.walk(folder) for f in names]
        return os.path.join(folder, choose(files, quant)[0])
    except Exception:
        raise ModelError(f"-hf {repo}: cannot be reached, and it was not downloaded before: {_first_line(reason)}") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
