"""Writes a GGUF with the header of a published model and holes for its weights: `moeoff
inspect --probe off` then says what the model takes, without its download.

Names, shapes and types of all tensors are those of shape_model.py. On disk the file
takes the room of its header. It loads, but all that it computes with is zeros.
"""

from __future__ import annotations

import click

from moeoff.cli.options import command
from moeoff.gguf.file import DEFAULT_ALIGNMENT
from moeoff.gguf.writer import header_bytes
from moeoff.system.files import atomic_file
from shape_model import SHAPES, metadata, tensors, tokenizer


def header_model(
    name: str, out: str, experts_type: str | None = None, *, overwrite: bool = False
) -> None:
    """Writes the file. Raises `WriteError` if it exists (unless overwrite)."""
    shape = SHAPES[name].cut(expert_type=experts_type)
    plan = tensors(shape)
    header = header_bytes(metadata(shape) | tokenizer(shape.n_vocab)[1], plan, DEFAULT_ALIGNMENT)
    with atomic_file(out, overwrite=overwrite) as file:
        file.write(header)
        file.truncate(
            len(header)
            + sum(-(-tensor.n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT for tensor in plan)
        )


@command()
@click.argument("name", type=click.Choice(list(SHAPES)))
@click.option("-o", "--out", metavar="OUT.gguf", required=True)
@click.option(
    "--experts-type",
    metavar="TYPE",
    help="ggml type of the routed experts. Default: the published file's.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.gguf if it exists.")
def main(name: str, out: str, experts_type: str | None, overwrite: bool) -> None:
    """Writes the header of a published model, and holes for its weights."""
    header_model(name, out, experts_type, overwrite=overwrite)


if __name__ == "__main__":
    main()
