"""The chat as a person sees it: a real terminal, real keys, the demo model."""

import io
import json
import re
import termios
from contextlib import redirect_stdout

import pytest

from helpers.clients import CHANNELS, THINKS
from helpers.models import rewritten
from helpers.servers import client_of
from helpers.terminal import STATS, Terminal
from moeoff.cli.chat import Chat, is_open, unquote
from moeoff.cli.client import Client
from moeoff.cli.writer import Writer
from moeoff.precision import Precision

CTRL_C = "\x03"
CTRL_J = "\n"
UP = "\x1b[A"


@pytest.fixture
def chat(tmp_path):
    """Starts a chat and waits for its prompt."""
    opened = []

    def start(*args: str) -> Terminal:
        terminal = Terminal("--temp", "0", *args, cache=tmp_path / "cache")
        opened.append(terminal)
        terminal.ready()
        return terminal

    yield start
    for terminal in opened:
        terminal.__exit__()


def saved(terminal: Terminal, path) -> list[dict]:
    terminal.ask(f"/save {path}")
    return json.loads(path.read_text())


def prompt_counts(output: str) -> tuple[int, int]:
    """Prompt tokens computed and reused, from the line of statistics."""
    match = re.search(r"prompt (\d+) tokens(?: \(\+(\d+) reused\))?", output)
    return int(match[1]), int(match[2] or 0)


def test_answers_and_leaves(chat):
    terminal = chat("-n", "24")
    output = terminal.ask("How many apples are there?")
    line = re.search(STATS, output)[0]
    for words in (
        "prompt ",
        "tok/s",
        "generated 24",
        "hit rate",
        "MB/token read",
        "stalled",
        " of ",
    ):
        assert words in line
    assert len(output[: output.index(line)].split()) > 5
    assert terminal.leave() == 0


def talk(client: Client, *lines: str) -> None:
    """Type these lines, then Ctrl-D."""
    typed = iter(lines)
    Chat(client, read=lambda: next(typed, None) or _leave()).loop()


def test_second_turn_has_the_first_in_its_prompt(chat, tmp_path, demo):
    terminal = chat("-n", "24", "--system", "Be brief.")
    first = terminal.ask("How many apples are there?")
    second = terminal.ask("And how many pears?")
    messages = saved(terminal, tmp_path / "chat.json")
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == "How many apples are there?"
    assert messages[2]["content"].split()[0] in first
    with client_of(demo, "-c", "256", "-n", "1") as client:
        n_prompt = client.ask(messages[:-1], lambda *_: None).prompt_tokens
    computed, reused = prompt_counts(second)
    assert computed + reused == n_prompt
    assert reused > 10  # the first question and its answer were still in the KV cache


def test_many_lines(chat, tmp_path):
    terminal = chat("-n", "4")
    terminal.child.send("one" + CTRL_J)
    terminal.ask("two")
    terminal.child.send("three\\\r")
    terminal.ask("four")
    terminal.child.send('"""five\rsix\r')
    terminal.ask('"""')
    terminal.child.send("\x1b[200~seven\neight\x1b[201~")  # what a terminal sends for a paste
    terminal.ask("")
    questions = [
        m["content"] for m in saved(terminal, tmp_path / "chat.json") if m["role"] == "user"
    ]
    assert questions == ["one\ntwo", "three\nfour", "five\nsix", "seven\neight"]


def test_what_is_typed_ahead_waits_as_its_own_messages(chat, tmp_path):
    """Two lines typed while an answer is written are two questions, and stand nowhere
    in it.
    """
    terminal = chat("-n", "96", "--ignore-eos", "-c", "1024")
    terminal.say("Tell a story.")
    terminal.child.send("Xylo?\rZebra?\r")
    answers = [terminal.read_to(STATS) for _ in range(3)]
    assert "Xylo" not in answers[0] and "Xylo" in answers[1] and "Zebra" in answers[2], answers
    terminal.ready()
    questions = [
        m["content"] for m in saved(terminal, tmp_path / "chat.json") if m["role"] == "user"
    ]
    assert questions == ["Tell a story.", "Xylo?", "Zebra?"]


def test_what_is_typed_while_the_model_is_loaded_waits_too(tmp_path):
    """Enter ends a message there, and is no new line of the first one; nothing is
    echoed. Where a load fails the terminal is left as it was.
    """
    options = ("-n", "8", "--temp", "0")
    with Terminal(*options, cache=tmp_path / "cache") as terminal:
        terminal.child.expect("loading demo")
        mode = termios.tcgetattr(terminal.child)
        assert not mode[0] & termios.ICRNL and not mode[3] & termios.ECHO
        terminal.child.send("Xylo?\rZebra?\r")
        terminal.ready()
        assert "Xylo" not in terminal.child.before
        assert "Xylo" in terminal.read_to(STATS) and "Zebra" in terminal.read_to(STATS)
        terminal.ready()
        questions = saved(terminal, tmp_path / "chat.json")[::2]
        assert [message["content"] for message in questions] == ["Xylo?", "Zebra?"]
    with Terminal("--memory", "1M", *options, cache=tmp_path / "cache") as terminal:
        before = termios.tcgetattr(terminal.child)
        assert terminal.ended() == 1 and "1.00 MiB is too small" in terminal.child.before
        assert termios.tcgetattr(terminal.child) == before


def test_when_a_text_is_complete():
    assert is_open('"""') and is_open('"""a\nb') and is_open('  """a')
    assert not is_open("") and not is_open("a") and not is_open('"""a"""') and not is_open('a """')
    assert (
        unquote('"""a\nb"""') == "a\nb" and unquote('"""\na\n"""') == "a" and unquote(" a ") == "a"
    )


def test_a_model_without_a_template_chats_with_a_remark(chat, demo, tmp_path):
    """And goes on from its earlier answers."""
    bare = rewritten(demo, tmp_path / "bare.gguf", {"tokenizer.chat_template": None})
    terminal = Terminal("-m", bare, "-n", "24", "--temp", "0", cache=tmp_path / "other")
    with terminal:
        text = " ".join(terminal.ready().split())
        assert "the model has no chat template, chatting in a plain transcript" in text
        assert "--chat-template" in text
        first = sum(prompt_counts(terminal.ask("How many?")))
        assert prompt_counts(terminal.ask("And how many more?"))[1] >= first + 8


def test_commands(chat, tmp_path):
    terminal = chat("-n", "8")
    terminal.child.send("half a question" + CTRL_C)  # which clears the line
    terminal.ready()
    assert "there is no question yet" in terminal.ask("/regen")
    text = terminal.ask("/help")
    assert all(
        name in text
        for name in "/help /clear /regen /system /think /save /load /memory /exit Ctrl-J".split()
    )
    assert "/bogus: unknown command" in terminal.ask("/bogus")

    assert "there is no system prompt" in terminal.ask("/system")
    assert "system prompt set" in terminal.ask("/system Be kind.")
    assert "Be kind." in terminal.ask("/system")
    with_system = sum(prompt_counts(terminal.ask("Hello?")))

    path = tmp_path / "chat"
    assert "2 messages" in terminal.ask(f"/save {path}")
    assert "exists: repeat the command" in terminal.ask(f"/save {path}")
    assert "2 messages" in terminal.ask(f"/save {path}")
    assert "expected FILE" in terminal.ask("/save") and "expected FILE" in terminal.ask("/load")
    assert "cannot be written" in terminal.ask("/save /nowhere/at/all")
    path.write_text("system: Be kind.")
    assert "expected a conversation" in terminal.ask(f"/load {path}")
    assert "missing.json: cannot be read: No such file" in terminal.ask("/load missing.json")

    before = saved(terminal, tmp_path / "before.json")
    assert re.search(STATS, terminal.ask("/regen"))
    after = saved(terminal, tmp_path / "after.json")
    assert after[:2] == before[:2] and [m["role"] for m in after[2:]] == ["assistant"]
    assert [m["content"] for m in after[:2]] == ["Be kind.", "Hello?"]
    assert "conversation cleared" in terminal.ask("/clear")
    assert "there is no question yet" in terminal.ask("/regen")
    assert "2 messages" in terminal.ask(f"/load {tmp_path / 'before.json'}")
    assert saved(terminal, tmp_path / "loaded.json") == before
    assert "conversation cleared" in terminal.ask("/clear")
    assert "system prompt removed" in terminal.ask("/system -")
    assert sum(prompt_counts(terminal.ask("Hello?"))) < with_system
    assert [m["role"] for m in saved(terminal, tmp_path / "chat.json")] == ["user", "assistant"]
    terminal.say("/exit")
    assert terminal.ended() == 0


def test_memory(chat):
    terminal = chat("-n", "8")
    assert re.search(
        r"experts at most .*, context 0 of 256 tokens", " ".join(terminal.ask("/memory").split())
    )
    assert "of 200 MiB" in terminal.ask("/memory 200M")
    assert "of 200 MiB" in " ".join(terminal.ask("Hello?").split())
    assert "is more than the" in terminal.ask("/memory 99999G")
    assert "of 200 MiB" in terminal.ask("/memory 200M")
    assert "not a size" in terminal.ask("/memory soon")
    assert "too small" in terminal.ask("/memory 20M")
    assert "of 200 MiB" in " ".join(terminal.ask("Hello again?").split())


def test_ctrl_c_stops_the_answer_and_not_the_program(chat):
    terminal = chat("-c", "8192", "--ignore-eos", "--expert-memory", "400K")
    terminal.say("How many apples are there?")
    terminal.child.expect(r"\w+ \w+ \w+")
    terminal.child.send(CTRL_C)
    assert "stopped | prompt " in terminal.ready()
    terminal.say("And pears?")
    terminal.child.expect(r"\w+ \w+ \w+")
    terminal.child.send(CTRL_C)
    assert prompt_counts(terminal.ready())[1] > 0
    assert terminal.leave() == 0


def test_full_context(chat):
    terminal = chat("-c", "256")
    assert "the question has" in terminal.ask("apples and pears " * 150)
    for _ in range(8):
        output = terminal.ask(
            "How many apples are there in a box of one hundred and fifty apples and pears?"
        )
        if "the conversation with this question" in output:
            break
    else:
        pytest.fail("eight answers did not fill 256 tokens")
    assert "/clear" in output
    terminal.ask("/clear")
    assert re.search(STATS, terminal.ask("How many apples?"))


def test_lines_are_remembered(chat, tmp_path):
    terminal = chat("-n", "4")
    terminal.ask("What is remembered?")
    assert terminal.leave() == 0
    path = tmp_path / "cache" / "moeoff" / "chat_history"
    assert "What is remembered?" in path.read_text() and path.stat().st_mode & 0o077 == 0
    terminal = chat("-n", "4")
    terminal.child.send(UP)
    terminal.ask("")
    messages = saved(terminal, tmp_path / "chat.json")
    assert messages[0]["content"] == "What is remembered?"
    terminal = chat("-n", "4", "--no-history")
    terminal.ask("What is forgotten?")
    assert "What is forgotten?" not in path.read_text()


def test_thoughts_can_be_turned_off(demo, capfd):
    """By the template's own variable."""
    with client_of(demo, "-c", "256", "-n", "2", "--chat-template", THINKS) as client:
        talk(client, "/think maybe", "/think off")
        assert "/think: expected on or off" in capfd.readouterr().err
        counts = []
        for wish in ("on", "off"):
            talk(client, f"/think {wish}")
            counts.append(
                client.ask([{"role": "user", "content": "Hi"}], lambda *_: None).prompt_tokens
            )
        assert counts[0] != counts[1]


@pytest.mark.parametrize(
    "template, text",
    [
        (THINKS, r"<think>\nso it is\n</think>\n\nyes"),
        (
            CHANNELS,
            (
                "<|channel|>analysis<|message|>so it"
                " is<|end|><|start|>assistant<|channel|>final<|message|>yes"
            ),
        ),
    ],
    ids=["think", "gpt-oss"],
)
def test_thoughts_stay_out_of_the_answer_and_the_next_turn(demo, capfd, template, text):
    """The template tells a model's thoughts apart; a pipe does not show them."""
    seen = []
    with client_of(demo, "-c", "512", "--chat-template", template, "--temp", "0") as client:
        client.settings["grammar"] = f'root ::= "{text}"'
        answer = client.ask(
            [{"role": "user", "content": "Hi"}],
            lambda text, is_thought: seen.append((text, is_thought)),
        )
        assert (answer.thought.strip(), answer.text) == ("so it is", "yes")
        assert {is_thought for _, is_thought in seen} == {True, False}
        talk(client, "Is it?", "Really?")
    out = capfd.readouterr().out
    assert out == "yes\nyes\n"


def test_a_deterministic_chat_repeats_in_any_memory(demo):
    """The same question gets the same answer, too: nothing of what was asked before is
    gone on from.
    """
    rule = {"precision": Precision(tau=0.3, resident=0.5), "deterministic": True}
    answers = []
    for memory in ("2M", "8M"):
        words = ("-c", "256", "-n", "24", "--temp", "0", "--ignore-eos")
        with client_of(demo, *words, expert_memory=memory, **rule) as client:
            asked = [{"role": "user", "content": "How many apples?"}]
            answers += [client.ask(asked, lambda *_: None) for _ in range(2)]
    assert len({answer.text for answer in answers}) == 1 and answers[1].reused_tokens == 0
    assert answers[0].stats.skipped == answers[3].stats.skipped > 0


def test_how_answers_are_drawn_can_be_changed(demo, capfd):
    with client_of(demo, "-c", "256", "--temp", "0.5") as client:
        talk(
            client,
            "/set",
            "/set n_predict 3",
            "/set ignore_eos on",
            "/set top_p 7",
            "/set warmth 1",
            "Hello?",
        )
        assert client.settings == {"n_predict": 3, "ignore_eos": True}
    text = capfd.readouterr().err
    assert "| generated 3, " in text
    assert "n_predict -1, temp 0.5, top_k 40" in text
    assert "n_predict 3, temp 0.5" in text
    assert "/set top_p: expected 0 to 1, got 7" in text
    assert "expected a NAME of n_predict, temp, top_k" in text


def _leave() -> str:
    raise EOFError


@pytest.mark.parametrize(
    "pieces, shown",
    [
        ([" one two", " th", "ree four"], "one two th\x1b[2D\x1b[K\nthree four"),
        (["```\nalways on one line\n```\n", "a"], "```\nalways on one line\n```\na"),
        ([("so", True), ("x<", False), "y"], "\x1b[2mso\x1b[0m\n\nx<y"),
    ],
)
def test_an_answer_on_a_narrow_terminal(monkeypatch, pieces, shown):
    """Words stay whole, but for those of programs; thoughts are dimmed."""
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setenv("COLUMNS", "10")
    with redirect_stdout(out):
        writer = Writer()
        for piece in pieces:
            writer.write(*([piece] if isinstance(piece, str) else piece))
        writer.end()
    assert out.getvalue() == shown + "\x1b[0m\n"
