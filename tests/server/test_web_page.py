"""llama-server's web page on `moeoff.server.Server`, as a person uses it: in a browser."""

from __future__ import annotations

import re

import httpx
import pytest

from helpers.browser import Browser, Chat, find_browser
from helpers.servers import Service
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
            "--override-kv",
            "qwen2moe.context_length=int:4096",
        ],
    ) as server:
        if httpx.get(server.url, timeout=300).status_code == 404:
            pytest.skip("the server was built without its web page, which wants npm")
        yield server.url


@pytest.fixture
def browser(program, url, tmp_path):
    with Browser(program, tmp_path / "profile") as browser:
        yield browser


def metric(url: str, name: str) -> float:
    return float(
        re.search(
            rf"^llamacpp:{name} (\S+)$", httpx.get(f"{url}/metrics", timeout=300).text, re.MULTILINE
        )[1]
    )


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


def test_it_is_ours_and_says_what_an_answer_took(browser, url):
    """Its name, an answer's hits and its experts' memory; and what it asks for, it
    gets: a browser's console shows each refusal as an error.
    """
    chat = Chat(browser, url)
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
def test_the_page_of_figures(browser, url, width):
    page = browser.open(f"{url}/moeoff", width)
    page.wait("document.getElementById('state')?.textContent === 'live'")
    httpx.post(f"{url}/completion", json={"prompt": "Count:", "n_predict": 200}, timeout=300)
    page.wait(
        "document.querySelectorAll('#layers rect.a').length > 1 &&"
        " document.getElementById('span').textContent.startsWith('The last')"
    )
    assert (
        value(page, "hits").endswith(" %")
        and value(page, "memory").endswith("MiB")
        and "experts 4 MiB" in value(page, "keys")
    )
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
        assert (
            chat.page.evaluate("document.querySelectorAll('.chat-message-user-bubble').length") == 1
        )
