"""A stand-in for llama-server's program that serves with `moeoff.Server`: what server_conformance.py gives to llama-server's own tests.

Takes llama-server's arguments. Those that moeoff has an option for become that option, the others are passed on.
The experts get so little memory that they really come from disk.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

import moeoff
from moeoff.errors import MoeoffError

EXPERT_MEMORY = "4M"
MOST_VERBOSE = "10"  # the level from which on llama-server's --verbose shows in answers; moeoff's own verbose is its log alone
PAD = 256  # to which llama.cpp rounds a context up
VALUES: dict[str, tuple[str, type]] = {
    "--model": ("model", str), "--host": ("host", str), "--port": ("port", int), "--threads": ("n_threads", int), "--batch-size": ("n_batch", int),
    "--ubatch-size": ("n_ubatch", int), "--ctx-size": ("n_ctx", int), "--parallel": ("parallel", int), "--alias": ("alias", str),
    "--api-key": ("api_key", str), "--cors-origins": ("cors", str), "--cache-ram": ("cache_ram", int), "--model-draft": ("draft", str),
    "--spec-type": ("spec_type", str), "-ctk": ("type_k", str), "-ctv": ("type_v", str), "-fa": ("flash_attn", str), "--n-gpu-layers": ("n_gpu_layers", int),
}  # fmt: skip
SWITCHES = {
    "--embedding": "embedding", "--kv-unified": "kv_unified", "--swa-full": "swa_full", "--context-shift": "context_shift", "--metrics": "metrics",
    "--verbose": "verbose",
}  # fmt: skip


def options(argv: list[str]) -> dict[str, Any]:
    """Keyword arguments of `moeoff.Server`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, (name, kind) in VALUES.items():
        parser.add_argument(flag, dest=name, type=kind)
    for flag, name in SWITCHES.items():
        parser.add_argument(flag, dest=name, action="store_true")
    given, args = parser.parse_known_args(argv)
    out = {name: value for name, value in vars(given).items() if value is not None and value is not False}
    for name in ("metrics", "n_gpu_layers"):  # always there; refused where there is no GPU
        out.pop(name, None)
    if "cache_ram" in out:
        out["cache_ram"] = f"{out['cache_ram']}M" if out["cache_ram"] > 0 else 0
    if "cors" in out:
        out["cors"] = tuple(out["cors"].split(","))
    if "flash_attn" in out:
        out["flash_attn"] = out["flash_attn"] != "off"
    if out.get("verbose"):
        args += ["-lv", MOST_VERBOSE]
    # llama-server divides the context among the slots; in moeoff they share it, and so are told how much is theirs
    if not out.pop("kv_unified", False) and "n_ctx" in out and "parallel" in out:
        each = -(-out["n_ctx"] // out["parallel"] // PAD) * PAD
        out["n_ctx"] = each * out["parallel"]
        args += ["--kv-unified-per-slot", str(each)]
    return out | {"args": tuple(args), "expert_memory": EXPERT_MEMORY, "profile": False, "experts": False, "settings": False}


def end(*_: object) -> None:
    raise SystemExit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    keywords = options(sys.argv[1:])
    if "model" not in keywords:
        sys.exit("moeoff serves one model, which is given at the start: there is no router")
    try:
        with moeoff.Server(keywords.pop("model"), **keywords) as server:
            server.wait()
    except MoeoffError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
