"""Pictures of `moeoff report`'s page for docs/guides/tune.md: as a desktop and as a phone show it. Needs a headless Chromium.

usage: capture_report.py MODEL --memory SIZE [--browser chromium]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from moeoff.report import write_report

IMAGES = Path(__file__).parent.parent / "docs" / "img"
SHOTS = {"report.png": (1100, 1750, []), "report-phone.png": (390, 1500, ["--blink-settings=preferredColorScheme=0"])}  # 0: dark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(write_report(options.model, memory=options.memory, flash_attn=True), encoding="utf-8")
        for name, (width, height, more) in SHOTS.items():
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/browser", *more]
            size = ["--force-device-scale-factor=1", f"--window-size={width},{height}", f"--screenshot={IMAGES / name}"]
            subprocess.run([options.browser, *flags, *size, page.as_uri()], check=True, capture_output=True, timeout=120)
            print(IMAGES / name)


if __name__ == "__main__":
    main()
