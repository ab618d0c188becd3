"""How many tokens of a prompt are computed at once: what memory allows, and what takes the least time."""

from hypothesis import given
from hypothesis import strategies as st

from moeoff.budget.micro_batch import SIZES, USUAL, PromptRates, choose

GIB = 1 << 30
FAST = PromptRates(token_seconds=0.0005, bytes_per_second=1e9)  # 16 GiB of experts are read in 17 s, 512 tokens computed in 0.3
SLOW = PromptRates(token_seconds=0.1, bytes_per_second=2e9)


def buffers(n: int) -> int:
    return n * 100_000


def test_usual_until_something_is_measured():
    assert choose(4096, 6 * GIB, 16 * GIB, buffers, None).n_tokens == USUAL
    assert choose(300, 6 * GIB, 16 * GIB, buffers, None).n_tokens == 300


def test_larger_where_the_disk_is_the_limit():
    found = choose(8192, 6 * GIB, 16 * GIB, buffers, FAST)
    assert found.n_tokens == 4096
    assert "in pieces of 512" in found.reason


def test_usual_where_computing_is_the_limit():
    assert choose(8192, 6 * GIB, 16 * GIB, buffers, SLOW).n_tokens == USUAL


def test_usual_where_all_experts_stay():
    assert choose(8192, 20 * GIB, 16 * GIB, buffers, FAST).n_tokens == USUAL


def test_buffers_leave_the_experts_most_of_the_memory():
    for room in (GIB // 4, GIB // 16, GIB // 64):
        for rates in (None, FAST):
            n = choose(8192, room, 16 * GIB, buffers, rates).n_tokens
            assert n == SIZES[0] or buffers(n) <= room / 8


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 36), st.integers(1, 1 << 40), st.floats(1e-6, 10), st.floats(1e3, 1e11))
def test_never_slower_than_the_usual_one(n_ctx, room, expert_bytes, token_seconds, rate):
    rates = PromptRates(token_seconds, rate)
    usual, found = (choose(n_ctx, room, expert_bytes, buffers, r).n_tokens for r in (None, rates))
    assert usual <= found <= max(n_ctx, SIZES[0])
    n_prompt = min(n_ctx, 4096)

    def seconds(n):
        return max(n_prompt * token_seconds, -(-n_prompt // n) * max(expert_bytes - max(room - buffers(n), 0), 0) / rate)

    assert seconds(found) <= seconds(usual) * (1 + 1e-9)
