"""Models on this machine that other programs have downloaded. Writes nothing.

Searches the caches of Hugging Face and llama.cpp, Ollama's store, LM Studio's folder,
and the folders in `MOEOFF_MODELS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from .hub import quant_of
from .model_index import ModelIndex, SplitName

_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_REGISTRY = ("registry.ollama.ai", "library")  # what its names leave out


@dataclass(frozen=True)
class LocalModel:
    """A GGUF file.

    Attributes:
        name: Name in the program that downloaded it; `find` accepts unique parts.
        path: Path, of a split file the first part.
        place: Name of the folder's program.
    """

    name: str
    path: str
    place: str

    @property
    def nbytes(self) -> int:
        split = SplitName.parse(self.path)
        return sum(os.path.getsize(part) for part in (split.parts if split else [self.path]))


def local_models() -> list[LocalModel]:
    """Return the models, each file once, sorted by name, without reading headers."""
    home, cache = Path.home(), Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hugging_face = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or hugging_face / "hub")
    ollama = [Path(path) for path in [os.environ.get("OLLAMA_MODELS")] if path]
    places: list[tuple[str, Path, Callable[[Path], Iterator[tuple[str, Path]]]]] = [
        ("Hugging Face", hub, _in_hub),
        ("llama.cpp", Path(os.environ.get("LLAMA_CACHE") or cache / "llama.cpp"), _in_folder),
        *(
            ("Ollama", folder, _in_ollama)
            for folder in ollama
            or [home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
        ),
        ("LM Studio", home / ".lmstudio/models", _in_folder),
        ("LM Studio", cache / "lm-studio/models", _in_folder),
        *(
            ("MOEOFF_MODELS", Path(folder), _in_folder)
            for folder in os.environ.get("MOEOFF_MODELS", "").split(os.pathsep)
            if folder
        ),
    ]
    found: dict[str, LocalModel] = {}
    for place, folder, search in places:
        for name, path in search(folder):
            found.setdefault(os.path.realpath(path), LocalModel(name, str(path), place))
    return sorted(found.values(), key=lambda model: model.name.lower())


def find(name: str) -> str:
    """Return the path of a model by its name or a part of it, in any case.

    Of several matches, the only one with routed experts counts.

    Raises:
        ModelError: There is none, or more than one.
    """
    wanted = name.lower()
    models = local_models()
    matching = [model for model in models if wanted in model.name.lower()]
    exact = [model for model in matching if wanted == model.name.lower()]
    if len(exact or matching) > 1:
        matching = [model for model in exact or matching if _has_experts(model)]
    if not matching:
        others = "; moeoff models lists others" if models else ""
        raise ModelError(f"{name}: no such file, and no model of this name is found{others}")
    if len(exact or matching) > 1:
        names = ", ".join(model.name for model in matching)
        raise ModelError(f"{name}: more than one model has this in its name: {names}")
    return (exact or matching)[0].path


def _has_experts(model: LocalModel) -> bool:
    try:
        ModelIndex.read(model.path).require_experts()
    except ModelError:
        return False
    return True


def _files(folder: Path) -> Iterator[Path]:
    """Yield a folder's GGUF files without projectors and later parts."""
    for base, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            split = SplitName.parse(name)
            if name.lower().endswith(".gguf") and "mmproj" not in name.lower():
                if split is None or split.parts[0] == name:
                    yield Path(base, name)


def _in_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in _files(folder):
        split = SplitName.parse(path.name)
        yield (split.stem if split else path.stem), path


def _in_hub(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield ORG/REPO:QUANT, as for -hf, and a file of the snapshot."""
    for repository in sorted(folder.glob("models--*--*")):
        for path in _files(repository / "snapshots"):
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            yield f"{name}:{quant_of(path.name) or path.stem}", path


def _in_ollama(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield NAME:TAG, as for ollama run, and the manifest's blob."""
    manifests = folder / "manifests"
    for manifest in sorted(path for path in manifests.glob("*/*/*/*") if path.is_file()):
        try:
            layers = json.loads(manifest.read_text())["layers"]
            digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        *registry, name, tag = manifest.relative_to(manifests).parts
        prefix = "" if tuple(registry) == _OLLAMA_REGISTRY else "/".join(registry) + "/"
        for digest in digests:
            path = folder / "blobs" / str(digest).replace(":", "-")
            if path.is_file():
                yield f"{prefix}{name}:{tag}", path
