"""llama-server's web page on `moeoff.server.Server`, as a person uses it: in a browser."""

from __future__ import annotations

import re

import pytest

from helpers.browser import Browser, Chat, find_browser
from helpers.servers import LONGER, Service
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
def server(program, demo):
    with Service(
        demo,
        expert_memory=4 << 20,
        n_ctx=4096,
        args=[
            "-n",
            str(N),
            "--ignore-eos",
            "--temp",
            "0",
            *LONGER,
        ],
    ) as server:
        if server.get("/").status_code == 404:
            pytest.skip("the server was built without its web page, which wants npm")
        yield server


@pytest.fixture
def browser(program, server, tmp_path):
    with Browser(program, tmp_path / "profile") as browser:
        yield browser


def test_page_is_served_packed_and_its_scripts_too(server):
    """`/` is how a program finds out whether there is a page: 200, or 404 without one."""
    page = server.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    scripts = re.findall(r"\./(_app/[\w./-]+\.(?:js|css))", page.text)
    assert scripts
    for name in scripts:
        assert server.get(f"/{name}").status_code == 200, name


def test_it_is_ours_and_says_what_an_answer_took(browser, server):
    """The page has our name and shows an answer's hits and its experts' memory; its
    requests all succeed, as a browser's console would show a refusal as an error.
    """
    chat = Chat(browser, server.url)
    chat.ask(QUESTION)
    chat.read()
    assert (
        chat.page.evaluate(
            "document.querySelector('meta[name=apple-mobile-web-app-title]').content"
        )
        == "moeoff"
    )
    text = chat.page.evaluate("document.querySelector('.chat-message-assistant').textContent")
    assert re.search(r"\d t/s\s+\d+ % hits\s+4 MB", text), text
    refused = chat.page.evaluate(
        "performance.getEntriesByType('resource').filter((e) => e.responseStatus >= 400).map((e) =>"
        " e.name)"
    )
    assert refused == []


def value(page, name: str) -> str:
    return page.evaluate(f"document.getElementById({name!r}).textContent")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_figures(browser, server, width):
    page = browser.open(f"{server.url}/moeoff", width)
    page.wait("document.getElementById('state')?.textContent === 'live'")
    server.post("/completion", {"prompt": "Count:", "n_predict": 200})
    page.wait(
        "document.querySelectorAll('#layers rect.a').length > 1 &&"
        " document.getElementById('span').textContent.startsWith('The last')"
    )
    assert value(page, "hits").endswith(" %")
    assert value(page, "memory").endswith("MiB")
    assert "experts 4 MiB" in value(page, "keys")
    assert page.evaluate("document.querySelectorAll('#layers rect.rest').length") == page.evaluate(
        "document.querySelectorAll('#layers rect.a').length"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_of_figures_asks_for_the_key(program, demo, tmp_path):
    with (
        Service(demo, expert_memory=4 << 20, n_ctx=512, api_key="not-a-secret") as server,
        Browser(program, tmp_path / "profile") as browser,
    ):
        page = browser.open(f"{server.url}/moeoff")
        page.wait("document.body?.classList.contains('locked')")
        page.evaluate("document.getElementById('key').focus()")
        page.type("not-a-secret")
        page.press_enter()
        page.wait(
            "document.getElementById('state').textContent === 'live' &&"
            " !document.body.classList.contains('locked')"
        )
        assert value(page, "memory").endswith("MiB")
        # nothing has been asked: there is no speed
        assert [value(page, name) for name in ("decode", "prompt", "waiting")] == [
            "–",
            "–",
            "being answered",
        ]


def test_stop_ends_the_answer_here_and_on_the_server(browser, server):
    whole = Chat(browser, server.url)
    whole.ask(QUESTION)
    length = len(whole.read())
    chat = Chat(browser, server.url)
    before = server.metrics()["llamacpp:tokens_predicted_total"]
    chat.ask(QUESTION)
    chat.stop_after(20)
    wait_until(server.is_idle)
    assert 0 < server.metrics()["llamacpp:tokens_predicted_total"] - before < N
    stopped = chat.read()
    assert 20 <= len(stopped) < length
    chat.reload()
    assert chat.question() == QUESTION and chat.read() == stopped
    # and the conversation goes on
    chat.ask("And 3 + 4?")
    assert chat.read() != stopped


def test_two_chats_at_a_time(browser, server):
    chats = [Chat(browser, server.url), Chat(browser, server.url)]
    questions = [QUESTION, "How many legs has a spider?"]
    for chat, question in zip(chats, questions):
        chat.write(question)
    for chat in chats:
        chat.page.press_enter()
    wait_until(lambda: all(chat.answer() and chat.is_answering() for chat in chats))
    for chat, question in zip(chats, questions):
        assert chat.read() and chat.question() == question
        assert (
            chat.page.evaluate("document.querySelectorAll('.chat-message-user-bubble').length") == 1
        )
