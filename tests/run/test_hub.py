"""-hf: which files are meant, without a network; and the real client against a small
server that speaks the hub's words.
"""

import hashlib
import http.server
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from helpers.files import COMMAND
from moeoff.errors import ModelError, OptionError
from moeoff.gguf.hub import choose_files, parse_repository

FILES = """README.md config.json imatrix.gguf mmproj-F16.gguf Qwen3-30B-A3B-BF16-00002-of-00002.gguf Qwen3-30B-A3B-BF16-00001-of-00002.gguf
Qwen3-30B-A3B-Q4_K_M.gguf Qwen3-30B-A3B-Q4_K_S.gguf Qwen3-30B-A3B-IQ4_XS.gguf Qwen3-30B-A3B-UD-Q4_K_XL.gguf
Q8_0/Qwen3-30B-A3B-Q8_0-00002-of-00002.gguf Q8_0/Qwen3-30B-A3B-Q8_0-00001-of-00002.gguf""".split()


@pytest.mark.parametrize(
    "quant, expected",
    [
        (None, ["Qwen3-30B-A3B-Q4_K_M.gguf"]),
        ("q4_k_s", ["Qwen3-30B-A3B-Q4_K_S.gguf"]),
        ("IQ4_XS", ["Qwen3-30B-A3B-IQ4_XS.gguf"]),
        ("UD-Q4_K_XL", ["Qwen3-30B-A3B-UD-Q4_K_XL.gguf"]),
        (
            "Q8_0",
            [
                "Q8_0/Qwen3-30B-A3B-Q8_0-00001-of-00002.gguf",
                "Q8_0/Qwen3-30B-A3B-Q8_0-00002-of-00002.gguf",
            ],
        ),
        (
            "BF16",
            ["Qwen3-30B-A3B-BF16-00001-of-00002.gguf", "Qwen3-30B-A3B-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_choice(quant, expected):
    assert choose_files(FILES, quant) == expected


def test_choice_without_the_default_quant():
    assert choose_files(["mmproj-a.gguf", "b-Q8_0.gguf", "a-Q5_K_M.gguf"]) == ["a-Q5_K_M.gguf"]


@pytest.mark.parametrize(
    "files, quant, words",
    [
        (["README.md", "mmproj-F16.gguf"], None, "no GGUF file"),
        (FILES, "Q4_K", "it has BF16, IQ4_XS, Q4_K_M, Q4_K_S, Q8_0, UD-Q4_K_XL"),
        (
            ["a-Q4_K_M-00001-of-00003.gguf", "a-Q4_K_M-00003-of-00003.gguf"],
            None,
            "2 of the 3 parts",
        ),
    ],
)
def test_no_choice(files, quant, words):
    with pytest.raises(ModelError, match=words):
        choose_files(files, quant)


def test_spec():
    assert parse_repository("ggml-org/some.Model_1-GGUF") == ("ggml-org/some.Model_1-GGUF", None)
    assert parse_repository("a/b:q8_0") == ("a/b", "q8_0")
    for wrong in ("model", "a/b/c", "a/b:", "", "https://a/b", "a/"):
        with pytest.raises(OptionError, match="expected ORG/REPO"):
            parse_repository(wrong)


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, people/demo, with one model among other files."""

    files: dict[str, bytes] = {}
    fetched: list[str] = []

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        name = path.removeprefix("/people/demo/resolve/main/")
        headers = {"X-Repo-Commit": "c" * 40, "Content-Type": "application/json"}
        if path.startswith("/api/models/people/demo"):
            if "/tree/" in path:
                answer = [
                    {"type": "file", "path": f, "size": len(d), "oid": "0" * 40}
                    for f, d in self.files.items()
                ]
            else:
                answer = {
                    "id": "people/demo",
                    "sha": "c" * 40,
                    "siblings": [{"rfilename": f} for f in self.files],
                }
            status, data = 200, json.dumps(answer).encode()
        elif name in self.files:
            status, data = 200, self.files[name]
            headers |= {
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                "Content-Type": "application/octet-stream",
            }
            if body:
                self.fetched.append(name)
        else:
            status, data = 404, b"{}"
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_args):
        pass


# seconds; 10 may be too few on a busy machine
PATIENT = {"HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300"}


def moeoff_hf(spec: str, endpoint: str, home: Path, **env) -> subprocess.CompletedProcess:
    env = (
        os.environ
        | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        | PATIENT
        | env
    )
    command = [COMMAND, "run", "-hf", spec, "-p", "How many?", "-n", "4"]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )


def test_download(demo, tmp_path):
    Hub.files = {
        "README.md": b"x",
        "mmproj-F16.gguf": b"x",
        "demo-Q4_K_M.gguf": b"x",
        "demo-Q8_0.gguf": Path(demo).read_bytes(),
    }
    Hub.fetched.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        done = moeoff_hf("people/demo:q8_0", endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() and Hub.fetched == ["demo-Q8_0.gguf"]
        assert moeoff_hf("people/demo:q8_0", endpoint, tmp_path).returncode == 0
        assert Hub.fetched == ["demo-Q8_0.gguf"]  # the second time it is there
        missing = moeoff_hf("people/nothing", endpoint, tmp_path)
        assert missing.returncode == 1 and missing.stderr.startswith("Error: -hf people/nothing: ")
    finally:
        server.shutdown()
        server.server_close()
    offline = moeoff_hf("people/demo:Q8_0", endpoint, tmp_path)  # the server is gone
    assert offline.returncode == 0, offline.stderr
    never = moeoff_hf("people/other", endpoint, tmp_path)
    assert never.returncode == 1 and "cannot be reached" in never.stderr
    assert "Traceback" not in never.stderr and len(never.stderr.strip().splitlines()) == 1


def test_without_the_extra(tmp_path):
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError\n")
    done = moeoff_hf("people/demo", "http://127.0.0.1:9", tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == "Error: -hf needs huggingface_hub: pip install 'moeoff[hub]'"
