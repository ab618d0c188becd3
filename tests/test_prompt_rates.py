"""What prompts take is measured on the real model, kept for its next opening, and recalled only for the same files and threads."""

import numpy as np
import pytest

import moeoff
from moeoff.binding import api
from moeoff.budget.micro_batch import PromptRates
from moeoff.engine.prompt_rates import keep_rates, recall_rates
from moeoff.gguf.layout import Layout
from moeoff.memory import rss

RATES = PromptRates(0.01, 1e9)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_kept_for_the_same_files_and_threads(demo, cache):
    layout = Layout.read(demo)
    assert recall_rates(layout, 2) is None
    keep_rates(layout, 2, RATES)
    assert recall_rates(layout, 2) == RATES and recall_rates(layout, 4) is None
    keep_rates(layout, 2, PromptRates(0.012, 0.8e9))
    assert recall_rates(layout, 2) == RATES, "a little noise must not change the choice"
    keep_rates(layout, 2, slower := PromptRates(0.02, 1e9))
    assert recall_rates(layout, 2) == slower
    (file,) = (cache / "moeoff" / "rates").iterdir()
    file.write_text('{"token_seconds": 1}')
    assert recall_rates(layout, 2) is None


def test_measured_while_it_runs(grown):
    tokens = np.random.default_rng(0).integers(10, 4000, 300).tolist()
    with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory=rss() + (150 << 20), strategy="lru") as llm:
        assert llm.stats().micro_batch == api.llama_n_ubatch(llm.ctx)
        llm.eval(tokens[:200])
        layout, bytes_read = llm._parts.layout, llm.stats().bytes_read
    assert recall_rates(layout, 2) is None, "too short to tell"
    with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory=rss() + (150 << 20), strategy="lru") as llm:
        llm.eval(tokens)
        assert llm.stats().bytes_read >= bytes_read > 64 << 20
    found = recall_rates(layout, 2)
    assert found.token_seconds > 0 and found.bytes_per_second > 0


def test_a_small_budget_takes_a_smaller_micro_batch(grown, tmp_path):
    with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory="2G") as llm:
        usual, needs = llm.micro_batch.n_tokens, llm.plan.needs
    assert usual == 512
    budget = needs.total - needs.computing + 4 * needs.computing
    with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory=budget) as llm:
        assert llm.stats().micro_batch == api.llama_n_ubatch(llm.ctx) < usual
        assert llm.plan.needs.computing < needs.computing
        assert "leave the experts most of the memory" in llm.stats().micro_batch_reason
    for options in ({"deterministic": True}, {"trace": tmp_path / "trace"}, {"replay": tmp_path / "trace"}):
        with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory=budget + 2 * needs.computing, **options) as llm:
            assert llm.stats().micro_batch == usual, "a recorded run must be the same at another budget"
            llm.eval(range(300, 600))
