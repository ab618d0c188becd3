"""Where the files are that tests use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "moeoff" / "data" / "demo-moe-q8_0.gguf"
SMALL_TRACE = ROOT / "tests" / "data" / "small.trace"
CALIBRATION_TEXTS = [str(ROOT / "docs" / "design.md"), str(ROOT / "moeoff" / "engine" / "llama.py")]
