"""scripts/build/server_conformance.py, but for the run itself, which is `make
server-conformance`.
"""

import server_conformance
from moeoff.options import Config, ServerOptions

SUITE = (
    "--port 8123 --temp 0.8 --n-predict -1 --host 127.0.0.1 --model m.gguf --batch-size 32"
    " --no-slots --alias a,b".split()
)


def test_what_moeoff_has_an_option_for_becomes_that_option():
    more = [
        "-ctk",
        "q8_0",
        "-fa",
        "off",
        "--cache-ram",
        "100",
        "--cors-origins",
        "https://a,https://b",
        "--embedding",
        "--metrics",
        "--context-shift",
    ]
    options = server_conformance.options(SUITE + more)
    assert options.pop("args") == ("--temp", "0.8", "--n-predict", "-1", "--no-slots")
    assert {"port": 8123, "host": "127.0.0.1", "model": "m.gguf", "n_batch": 32, "alias": "a,b", "type_k": "q8_0", "flash_attn": False, "cache_ram": 100 << 20,
            "cors": ["https://a", "https://b"], "embedding": True, "context_shift": True}.items() <= options.items()  # fmt: skip


def test_the_options_are_ones_that_the_server_takes():
    options = server_conformance.options(
        [*SUITE, "--ctx-size", "512", "--parallel", "2", "--verbose", "--swa-full"]
    )
    ours = {
        name: options.pop(name)
        for name in list(options)
        if name in ServerOptions.__dataclass_fields__
    }
    ServerOptions.make(**ours)
    Config.make(options.pop("model"), **options)


def test_only_what_stock_passes_counts_and_exceptions_are_known(capsys):
    exceptions = {"b": "its reason", "d": "no longer true"}
    stock = {"a": "", "b": "", "c": "failure", "d": "", "e": ""}
    ours = {"a": "", "b": "failure", "c": "failure", "d": ""}  # e was not run
    assert server_conformance.compare(stock, ours, exceptions) == 1
    output = capsys.readouterr().out
    assert "its reason" in output and "FAILED     e" in output and "take it off the list" in output
    assert "passes 4 of 5 tests; of these moeoff's server passes 2" in output
