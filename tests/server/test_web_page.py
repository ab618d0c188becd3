"""llama-server's web page on `moeoff.server.Server`, as a person uses it: in a browser."""

from __future__ import annotations

import re

import httpx
import pytest

from helpers.browser import Browser, Chat, find_browser
from helpers.servers import Served
from helpers.waiting import wait_until

pytestmark = pytest.mark.slow

N = 800  # tokens of every answer: long enough to be seen while it comes
QUESTION = "What is 2 + 3?"


@pytest.fixture(scope="module")
def program() -> str:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on PATH")
    return program


@pytest.fixture(scope="module")
def url(program, demo):
    with Served(
        demo, expert_memory=4 << 20, n_ctx=4096, args=["-n", str(N), "--ignore-eos", "--temp", "0", "--override-kv", "qwen2moe.context_length=int:4096"]
    ) as it:
        if httpx.get(it.url, timeout=300).status_code == 404:
            pytest.skip("the server was built without its web page, which wants npm")
        yield it.url


@pytest.fixture
def browser(program, url, tmp_path):
    with Browser(program, tmp_path / "profile") as browser:
        yield browser


def metric(url: str, name: str) -> float:
    return float(re.search(rf"^llamacpp:{name} (\S+)$", httpx.get(f"{url}/metrics", timeout=300).text, re.MULTILINE)[1])


def test_page_is_served_packed_and_its_scripts_too(url):
    """`/` is how a program finds out whether there is a page: 200, or 404 without one."""
    page = httpx.get(url, timeout=300)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    scripts = re.findall(r"\./(_app/[\w./-]+\.(?:js|css))", page.text)
    assert scripts
    for name in scripts:
        assert httpx.get(f"{url}/{name}", timeout=300).status_code == 200, name


def test_an_answer_comes_piece_by_piece_and_is_kept(browser, url):
    chat = Chat(browser, url)
    chat.ask(QUESTION)
    seen = chat.watch()
    assert len(seen) > 3, seen
    answer = chat.read()
    chat.reload()
    assert chat.question() == QUESTION and chat.read() == answer


def test_stop_ends_the_answer_here_and_on_the_server(browser, url):
    whole = Chat(browser, url)
    whole.ask(QUESTION)
    length = len(whole.read())
    chat = Chat(browser, url)
    before = metric(url, "tokens_predicted_total")
    chat.ask(QUESTION)
    chat.stop_after(20)
    wait_until(lambda: metric(url, "requests_processing") == 0)
    assert 0 < metric(url, "tokens_predicted_total") - before < N
    stopped = chat.read()
    assert 20 <= len(stopped) < length
    chat.reload()
    assert chat.question() == QUESTION and chat.read() == stopped
    # and the conversation goes on
    chat.ask("And 3 + 4?")
    assert chat.read() != stopped


def test_two_chats_at_a_time(browser, url):
    chats = [Chat(browser, url), Chat(browser, url)]
    questions = [QUESTION, "How many legs has a spider?"]
    for chat, question in zip(chats, questions):
        chat.write(question)
    for chat in chats:
        chat.page.press_enter()
    wait_until(lambda: all(chat.answer() and chat.is_answering() for chat in chats))
    for chat, question in zip(chats, questions):
        assert chat.read() and chat.question() == question
        assert chat.page.evaluate("document.querySelectorAll('.chat-message-user-bubble').length") == 1
