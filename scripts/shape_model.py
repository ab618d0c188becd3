"""Write a GGUF with the shape of a published MoE model and random weights, as fast as the disk takes it.

Hyperparameters, tensor names, types and sizes are the published model's; so are memory, reads and the work of a token. What it
writes is noise. Its routing is made to look like a trained model's (scripts/shape_weights.py says how), and
scripts/bench/bench_routing.py measures how well. The tokenizer is the demo model's, with unused tokens up to the shape's vocabulary.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moeoff.errors import MoeoffError, OptionError
from moeoff.gguf.file import ModelFile, ModelWriter, pack_array, unpack
from moeoff.gguf.quantize import type_from_name
from moeoff.paths import demo_model
from shape_table import SHAPES, Shape, metadata, tensors
from shape_weights import Scales, Weights

__all__ = ["find_shape", "shape_model", "tokenizer"]

_UNUSED = 5  # LLAMA_TOKEN_TYPE_UNUSED


def find_shape(name: str) -> Shape:
    """Of this name. Raises OptionError if the table has none."""
    if name not in SHAPES:
        raise OptionError(f"no shape is called {name}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_model(
    shape: Shape,
    out: str | os.PathLike[str],
    *,
    scales: Scales | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a model of this shape to `out`; the same seed gives the same file. progress(done, total) is called with bytes written.

    Raises OptionError for a type of experts of which no random blocks are made, ModelError for one that does not fit the rows,
    WriteError if `out` exists (unless overwrite).
    """
    tokens, vocabulary = tokenizer(shape.n_vocab)
    shape = replace(shape, n_vocab=len(tokens))
    plan = tensors(shape)
    with ModelFile(demo_model()) as demo:
        n_tokens = len(unpack(demo.metadata["tokenizer.ggml.tokens"]))
    weights = Weights(shape, scales or Scales(), seed, n_tokens)
    done, total = 0, sum(tensor.n_bytes for tensor in plan)
    with ModelWriter(out, metadata(shape) | vocabulary, plan, overwrite=overwrite) as writer:
        for tensor in plan:
            for piece in weights.pieces(tensor):
                if len(piece):
                    writer.write(piece)
                done += len(piece)
                progress(done, total)


def tokenizer(n_vocab: int) -> tuple[list[str], dict[str, bytes]]:
    """The demo model's tokens with unused ones up to n_vocab, and the keys of the tokenizer."""
    with ModelFile(demo_model()) as demo:
        keys = {key: raw for key, raw in demo.metadata.items() if key.startswith("tokenizer.")}
    tokens = list(unpack(keys["tokenizer.ggml.tokens"]))
    unused = range(len(tokens), n_vocab)
    tokens += [f"[unused {i}]" for i in unused]
    types = keys["tokenizer.ggml.token_type"]
    keys["tokenizer.ggml.tokens"] = pack_array(tokens)
    keys["tokenizer.ggml.token_type"] = types[:8] + struct.pack("<Q", len(tokens)) + types[16:] + struct.pack("<i", _UNUSED) * len(unused)
    return tokens, keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("-o", "--out", metavar="OUT.gguf", required=True)
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers alone")
    parser.add_argument("--experts-type", metavar="TYPE", help="ggml type of the routed experts (default: the published file's)")
    parser.add_argument("--shrink", type=int, default=1, metavar="K", help="divide all widths by K: for tests, and for measuring the routing quickly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.gguf if it exists")
    args = parser.parse_args()
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        if args.experts_type:
            type_from_name(args.experts_type)
        shape = find_shape(args.shape).cut(layers=args.layers, shrink=args.shrink, expert_type=args.experts_type)
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("writing")
            shape_model(shape, args.out, seed=args.seed, overwrite=args.overwrite, progress=lambda done, total: bar.update(task, completed=done, total=total))
    except (MoeoffError, OSError) as error:
        sys.exit(f"shape_model: {error}")
    except KeyboardInterrupt:
        sys.exit("shape_model: interrupted; nothing was written")


if __name__ == "__main__":
    main()
