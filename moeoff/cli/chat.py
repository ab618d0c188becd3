"""The chat of `moeoff run`: lines typed by a person, commands among them, and answers.

The conversation is a list of messages that the model's template renders anew for each question; llama_cpp finds that the
tokens begin as before and computes only the rest. A question that fails leaves no trace in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine.prompt import Template
from ..errors import ContextError, MoeoffError, OptionError
from ..options import in_flags
from ..system.console import note
from ..system.files import atomic_file
from ..system.memory import format_size, rss
from .completion import Completer, Completion, Writer

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent

    from ..engine.stats import Stats

QUOTES = '"""'

HELP = f"""\
/help              this list
/reset             forget the conversation; the system prompt stays
/stats             what this chat took so far
/system TEXT       set the system prompt; without TEXT show it, /system - removes it
/save FILE         write the conversation: JSON if FILE ends with .json, else text
/memory SIZE       change the memory budget, e.g. 6G or 80%; without SIZE show it
/exit              leave, as Ctrl-D does

Several lines: Ctrl-J or a backslash before Enter begins a new line; {QUOTES} begins a text of many lines and ends it.
Ctrl-C stops an answer, or clears the line. A text that begins with / needs a space before it."""


def is_open(text: str) -> bool:
    """True if Enter after this text begins a new line instead of sending it."""
    text = text.lstrip()
    return text.startswith(QUOTES) and QUOTES not in text[len(QUOTES) :]


def unquote(text: str) -> str:
    text = text.strip()
    if text.startswith(QUOTES):
        text = text[len(QUOTES) :].removesuffix(QUOTES).strip("\n")
    return text


class Chat:
    """A conversation with a person at a terminal.

    Args:
        completer: computes; it and its model stay the caller's.
        system: the system prompt.
        template: the chat template; None: the model's.
        read: gives the next line that was typed, raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D.

    Raises:
        ModelError: the chat template cannot be read.
    """

    def __init__(self, completer: Completer, system: str | None = None, template: str | None = None, read: Callable[[], str] | None = None):
        self._completer = completer
        self._llm = completer.llm
        if self._llm.engine.config.warm:
            self._llm.engine.watch_prompts()
        self._template = Template(self._llm, template)
        if self._template.stop:
            completer.stop_at(self._template.stop)
        self._read = read or _terminal_reader()
        self._waits = contextlib.nullcontext if read else typed_ahead
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._answers: list[Completion] = []
        self._begin = self._llm.stats()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/stats": self._stats,
            "/system": self._set_system,
            "/save": self._save,
            "/memory": self._memory,
        }

    def loop(self, share: str = "") -> Stats | None:
        """Reads and answers until the person leaves; returns the `Stats` of the whole chat, or None if nothing was asked.

        `share` is a note on where the budget comes from, if it is the default.
        """
        name, budget = os.path.basename(self._llm.model_path), self._llm.engine.plan.budget
        memory = f", {format_size(budget)} of memory{share}" if budget else ""
        note(f"{name}: {self._llm.n_ctx()} tokens of context{memory}. /help lists the commands, Ctrl-D leaves.")
        if self._template.stop:
            note("the model has no chat template: the chat is a plain transcript, which it may not have learnt (--chat-template)")
        with self._waits():
            while True:
                self._llm.engine.idle()  # while the person types
                try:
                    line = self._read()
                except KeyboardInterrupt:
                    continue
                except EOFError:
                    break
                if not line.strip():
                    continue
                if line.startswith("/"):
                    name, _, argument = line.strip().partition(" ")
                    if name in ("/exit", "/quit", "/bye"):
                        break
                    self._command(name, argument.strip())
                else:
                    self._ask(unquote(line))
        return self._total()

    def _command(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            return note(f"{name}: there is no such command; /help lists those there are")
        try:
            command(argument)
        except MoeoffError as error:
            note(in_flags(error, {"memory": ("/memory", "SIZE")}))
        except OSError as error:
            note(str(error))

    def _prompt(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._messages

    def _ask(self, question: str) -> None:
        if not question:
            return
        self._messages.append({"role": "user", "content": question})
        writer = Writer()
        try:
            answer = self._completer.complete(self._template.tokens(self._prompt()), writer.write)
        except ContextError as error:
            self._messages.pop()
            return note(_overflow(error, bool(self._messages)))
        except MoeoffError as error:
            self._messages.pop()
            writer.end()
            return note(in_flags(error, {}))
        writer.end()
        if answer.text.strip():
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()  # stopped before the first word: as if it had not been asked
        self._answers.append(answer)
        note(("stopped | " if answer.finish_reason == "cancelled" else "") + answer.summary())
        if answer.context_full:
            note(f"the context of {answer.n_ctx} tokens is full: /reset begins a new conversation, -c N at the start makes it larger")

    def _help(self, _argument: str) -> None:
        print(HELP)

    def _reset(self, _argument: str) -> None:
        self._messages.clear()
        note("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        if not text:
            return note(f"system prompt: {self._system}" if self._system else "there is no system prompt")
        old, self._system = self._system, None if text == "-" else unquote(text)
        try:
            self._template.tokens([*self._prompt(), {"role": "user", "content": "?"}])
        except MoeoffError:  # some templates have no place for it
            self._system = old
            raise
        note("system prompt set" if self._system else "system prompt removed")

    def _save(self, file: str) -> None:
        if not file:
            raise OptionError("/save FILE: say which file")
        path = os.path.expanduser(file)
        if path.lower().endswith(".json"):
            text = json.dumps(self._prompt(), ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"{m['role']}: {m['content'].strip()}\n" for m in self._prompt())
        with atomic_file(path, overwrite=False) as out:
            out.write(text.encode())
        note(f"{len(self._messages)} messages written to {file}")

    def _memory(self, size: str) -> None:
        if size:
            self._llm.set_memory(size)
        s = self._llm.stats()
        budget = f" of {format_size(s.budget_bytes)}" if s.budget_bytes else ""
        note(f"memory {format_size(rss())}{budget}, experts at most {format_size(s.arena_bytes)}")

    def _stats(self, _argument: str) -> None:
        s = self._total()
        if s is None:
            return note("nothing was asked yet")
        note(
            f"{len(self._answers)} answers: {s.prompt_tokens} prompt tokens computed, {s.prompt_tps:.1f} tok/s; "
            f"{s.gen_tokens} generated, {s.gen_tps:.1f} tok/s\n"
            f"experts: {s.hit_summary}, {format_size(s.bytes_read)} read, {s.evictions} evictions, stalled {s.stall_seconds:.2f} s\n"
            f"context: {self._llm.n_tokens} of {self._llm.n_ctx()} tokens"
        )
        self._memory("")

    def _total(self) -> Stats | None:
        """`Stats` since the chat began, its rates those of the answers together."""
        if not self._answers:
            return None
        parts = [answer.stats for answer in self._answers]
        return replace(
            self._llm.stats().since(self._begin, sum(s.cpu_seconds for s in parts)),
            gen_tps=_rate((s.gen_tokens, s.gen_tps) for s in parts),
        )


def _rate(parts: Iterable[tuple[int, float]]) -> float:
    """Tokens per second of (tokens, tokens per second) together."""
    parts = [(tokens, tps) for tokens, tps in parts if tps > 0]
    seconds = sum(tokens / tps for tokens, tps in parts)
    return sum(tokens for tokens, _ in parts) / seconds if seconds else 0.0


def _overflow(error: ContextError, has_history: bool) -> str:
    if not has_history:
        return f"this question has {error.n_tokens} tokens, the context {error.n_ctx}: shorten it, or start again with a larger -c"
    return (
        f"this conversation with the question would have {error.n_tokens} tokens, the context has {error.n_ctx}: "
        "/reset begins a new one, -c N at the start makes it larger; the question was dropped"
    )


@contextlib.contextmanager
def typed_ahead() -> Iterator[None]:
    """Makes what is typed before it is asked for wait as it was typed, while open: nothing of it is echoed into an answer, and each Enter ends a message."""
    terminal = sys.stdin.fileno()
    before, mode = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    mode[0] &= ~termios.ICRNL  # Enter would become Ctrl-J, which begins a new line
    mode[3] &= ~(termios.ECHO | termios.ICANON)
    mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
    termios.tcsetattr(terminal, termios.TCSADRAIN, mode)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _terminal_reader() -> Callable[[], str]:
    """A function that reads one text from the terminal, with editing, and a history that outlives the program."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-j", eager=True)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", eager=True)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    names = WordCompleter([line.split()[0] for line in HELP.splitlines() if line.startswith("/")], sentence=True)
    session: PromptSession[str] = PromptSession(
        ">>> ",
        multiline=True,
        prompt_continuation="... ",
        key_bindings=keys,
        completer=names,
        complete_while_typing=False,
        history=_history(),
    )
    return session.prompt


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from ..system.files import cache_folder

    try:
        path = cache_folder() / "chat_history"
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # what people ask is theirs alone
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
