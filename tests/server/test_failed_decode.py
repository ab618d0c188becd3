"""A decode that ends with an exception, which llama.cpp throws where memory is short,
while nobody waits for its answer any more.
"""

import shutil
import subprocess

import httpx
import pytest

from helpers.servers import LONGER, Service, words
from helpers.waiting import wait_until

THROWS = r"""
// before libllama's: where a decode was ended for nobody and the file ARMED exists, an exception takes the place of its result
#include <cstdlib>
#include <new>

#include <dlfcn.h>
#include <unistd.h>

extern "C" int llama_process(void * ctx, int type, void * batch) {
    using function = int (*)(void *, int, void *);
    static const auto real = (function) dlsym(dlopen("libllama.so", RTLD_LAZY | RTLD_NOLOAD), "llama_process");
    const int result = real(ctx, type, batch);
    if (result == 2 && unlink(getenv("ARMED")) == 0) {
        throw std::bad_alloc();
    }
    return result;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_the_next_answer_is_right(demo, tmp_path, monkeypatch):
    """The server takes back what ends such a decode."""
    armed, source, throws = (tmp_path / name for name in ("armed", "throws.cpp", "throws.so"))
    source.write_text(THROWS)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", source, "-o", throws, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(throws))
    monkeypatch.setenv("ARMED", str(armed))
    with Service(demo, expert_memory=400 << 10, n_ctx=4096, parallel=1, args=LONGER) as server:
        expected = server.complete("One day", 16).choices[0].text
        armed.touch()
        # a batch of a prompt is ended, a token is decoded to its end
        body = {"prompt": words(1, 4000), "cache_prompt": False}

        def hang_up() -> bool:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{server.url}/completion", json=body, timeout=httpx.Timeout(60, read=0.2)
                )
            return not armed.exists()

        wait_until(hang_up)
        assert server.complete("One day", 16).choices[0].text == expected
