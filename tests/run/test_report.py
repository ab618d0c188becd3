"""scripts/bench/report.py: the page's numbers are the run's, it needs nothing from
elsewhere, and it is read on a phone.
"""

from __future__ import annotations

import html.parser
import re

import pytest
from click.testing import CliRunner

import report
from moeoff.policies.replay import simulate
from report import MoreMemory, advice, main, record, render

pytestmark = pytest.mark.slow  # tests of scripts run in nightly


@pytest.fixture(scope="module")
def session(demo):
    return record(demo, expert_memory="5M", n_prompt=48, n_decode=40)


class Page(html.parser.HTMLParser):
    """Tags that were opened and not closed, and every address."""

    VOID = {"meta", "br", "img", "link", "input", "line"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page(session):
    text = render(session)
    page = Page(text)
    assert page.open == [] and page.links == []  # whole, and nothing comes over the network
    assert "http" not in re.sub(r"https?://www\.w3\.org\S*", "", text) and "<script" not in text
    assert 'name="viewport"' in text
    for title in (
        "Where the memory went",
        "Where a token's time went",
        "By layer",
        "What more memory would give",
    ):
        assert title in text
    # words in a picture would shrink with it, and lie over each other
    assert text.count("<svg") == text.count('preserveAspectRatio="none"') == 2
    assert "<text" not in text


def test_memory_adds_up(session):
    parts = report.memory_parts(session)
    assert sum(part.value for part in parts) == sum(session.decode.memory.values())
    assert next(part.value for part in parts if part.name == "experts") == session.arena


def test_layers_add_up(session):
    layers = report.layers(session)
    assert len(layers) == session.trace.model.n_gates
    assert sum(layer.nbytes for layer in layers) * session.n_tokens[1] == pytest.approx(
        session.decode.bytes_read, rel=0.05
    )
    assert all(
        0 <= layer.prefetched <= layer.nbytes and 0 <= layer.hit_rate <= 1 for layer in layers
    )


def test_time_is_the_time_that_was_taken(session):
    assert sum(part.value for part in report.time_parts(session)) == pytest.approx(
        1e3 * session.seconds[1] / session.n_tokens[1]
    )
    assert 0 < report.ceiling(session)


def test_more_memory_reads_less(session):
    rows = report.more_memory(session)
    (here,) = (row for row in rows if row.here)
    assert here.tps == pytest.approx(session.n_tokens[1] / session.seconds[1])
    assert [row.mb_per_token for row in rows] == sorted(
        (row.mb_per_token for row in rows), reverse=True
    )
    assert rows[-1].share == 1 and rows[-1].mb_per_token == 0 and rows[-1].tps > here.tps
    other = next(row for row in rows if not row.here and row.share < 1)
    replayed = simulate(
        session.trace, session.policy, int(other.share * session.trace.model.full_bytes)
    ).bytes_read
    now = simulate(session.trace, session.policy, session.arena).bytes_read
    assert other.mb_per_token / here.mb_per_token == pytest.approx(replayed / now, rel=1e-6)


def test_command(grown, tmp_path):
    page = tmp_path / "page.html"
    done = CliRunner().invoke(
        main, ["-m", grown, "--expert-memory", "5M", "-p", "16", "-n", "16", "-o", str(page)]
    )
    assert done.exit_code == 0, done.stderr
    assert Page(page.read_text()).open == []


def test_one_sentence_says_what_to_do():
    rows = [
        MoreMemory(0.3, 6 << 30, 0.7, 50, 4.0, True),
        MoreMemory(0.5, 8 << 30, 0.9, 20, 6.4),
        MoreMemory(1.0, 16 << 30, 1.0, 0, 8.0),
    ]
    assert advice(rows) == "With --memory 8G instead of 6G: about 1.6 x as fast."
    small = [rows[0]._replace(memory=760 << 20), rows[1]._replace(memory=(6500 << 20) + 1)]
    assert advice(small) == "With --memory 6.4G instead of 760M: about 1.6 x as fast."
    assert "More memory would give little" in advice([rows[0], rows[1]._replace(tps=4.2)])
