"""Models with another chat template."""

from __future__ import annotations

from pathlib import Path

from moeoff.gguf.file import ModelFile, ModelWriter, pack


def with_template(model: str, path: Path, template: str) -> str:
    """A copy of the model at the path."""
    with ModelFile(model) as source:
        with ModelWriter(path, source.metadata | {"tokenizer.chat_template": pack(template)}, list(source.tensors.values())) as writer:
            for name in source.tensors:
                writer.write(source.data(name))
    return str(path)
