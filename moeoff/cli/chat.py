"""The chat of `moeoff run`: lines typed by a person, commands among them, and answers.

The conversation is a list of messages that the server renders anew for each question; it finds that the tokens begin as
before and computes only the rest. A question that fails leaves no trace in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import termios
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ContextError, MoeoffError, OptionError
from ..option import table_of
from ..options import Sampling, in_flags
from ..system.console import note
from ..system.files import atomic_file, read_text
from ..system.memory import format_size, parse_size, rss
from .client import Client
from .options import remark_on_memory
from .writer import Writer

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent

QUOTES = '"""'
_SETTINGS = {name: line for name, line in table_of(Sampling).items() if name not in ("seed", "stop")}  # which hold for the whole program
_FIELDS = {"temp": "temperature"}  # of requests, where the names differ

HELP = f"""\
/help              this list
/clear             forget the conversation; the system prompt stays
/regen             answer the last question again
/system TEXT       set the system prompt; without TEXT show it, /system - removes it
/set NAME VALUE    change how answers are drawn, e.g. /set temp 0.2; without NAME show it
/think off         answer without thinking first, if the model does; /think on
/save FILE         write the conversation, as JSON
/load FILE         go on with a conversation that was saved
/memory SIZE       change the memory budget, e.g. 6G or 80%; without SIZE show it, and the context
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
        client: asks the model, which stays the caller's.
        system: the system prompt.
        is_transcript: the model has no chat template.
        read: gives the next line that was typed, raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D.
        history: what is typed is kept in a file for the next chat.
    """

    def __init__(self, client: Client, system: str | None = None, is_transcript: bool = False, read: Callable[[], str] | None = None, history: bool = True):
        self._client, self._server = client, client.server
        self._is_transcript = is_transcript
        self._read = read or _terminal_reader(history)
        self._waits = contextlib.nullcontext if read else typed_ahead
        self._system = system
        self._overwrites = ""  # the file that /save has found to be there
        self._messages: list[dict[str, Any]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/regen": self._regenerate,
            "/system": self._set_system,
            "/set": self._set_sampling,
            "/think": self._think,
            "/save": self._save,
            "/load": self._load,
            "/memory": self._memory,
        }

    def loop(self, share: str = "") -> None:
        """Reads and answers until the person leaves.

        `share` is a note on where the budget comes from, if it is the default.
        """
        engine = self._server.engine
        name, budget = os.path.basename(engine.config.model_path), engine.plan.budget
        memory = f", {format_size(budget)} of memory{share}" if budget else ""
        note(f"{name}: {self._server.n_ctx_each} tokens of context{memory}. /help lists the commands, Ctrl-D leaves.")
        if self._is_transcript:
            note("the model has no chat template: the chat is a plain transcript, which it may not have learnt (--chat-template)")
        with self._waits():
            while True:
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

    def _command(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            return note(f"{name}: there is no such command; /help lists those there are")
        try:
            command(argument)
        except MoeoffError as error:
            note(in_flags(error, {"memory": ("/memory", "SIZE"), **{name: (f"/set {name}", line.metavar) for name, line in _SETTINGS.items()}}))
        except OSError as error:
            note(str(error))

    def _prompt(self) -> list[dict[str, Any]]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._messages

    def _ask(self, question: str) -> None:
        if not question:
            return
        self._messages.append({"role": "user", "content": question})
        try:
            writer = Writer()
            try:
                answer = self._client.ask(self._prompt(), writer.write)
            finally:
                writer.end()
        except ContextError as error:
            self._messages.pop()
            return note(_overflow(error, bool(self._messages)))
        except MoeoffError as error:
            self._messages.pop()
            return note(in_flags(error, {}))
        if answer.text.strip():
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()  # stopped before the first word: as if it had not been asked
        self._client.say_remarks()
        note(("stopped | " if answer.finish_reason == "cancelled" else "") + answer.summary())
        if answer.finish_reason == "length" and self._client.n_tokens >= answer.n_ctx and not self._server.engine.config.context_shift:
            note(f"the context of {answer.n_ctx} tokens is full: /clear begins a new conversation; at the start -c N makes it larger, --context-shift goes on")

    def _help(self, _argument: str) -> None:
        print(HELP)

    def _clear(self, _argument: str) -> None:
        self._messages.clear()
        note("the conversation is forgotten")

    def _regenerate(self, _argument: str) -> None:
        if not self._messages:
            return note("nothing was asked yet")
        before = list(self._messages)
        del self._messages[-2:]
        self._ask(before[-2]["content"])
        if len(self._messages) < len(before):
            self._messages = before

    def _set_sampling(self, wish: str) -> None:
        name, _, value = wish.partition(" ")
        if name and (name not in _SETTINGS or not value):
            raise OptionError(f"/set NAME VALUE: a name is one of {', '.join(_SETTINGS)}")
        settings = self._client.settings
        if name:
            settings[_FIELDS.get(name, name)] = _SETTINGS[name].read(value)
        used = self._client.defaults() | settings
        note(", ".join(f"{name} {line.spell(_rounded(used[_FIELDS.get(name, name)]))}" for name, line in _SETTINGS.items()))

    def _think(self, wish: str) -> None:
        if wish not in ("on", "off"):
            raise OptionError("/think on, or /think off")
        self._client.settings["chat_template_kwargs"] = {"enable_thinking": wish == "on"}
        on, off = "answers begin with thoughts, if the model thinks", "answers come without thoughts, if the model's template knows how"
        note(on if wish == "on" else off)

    def _set_system(self, text: str) -> None:
        if not text:
            return note(f"system prompt: {self._system}" if self._system else "there is no system prompt")
        old, self._system = self._system, None if text == "-" else unquote(text)
        try:
            self._client.check([*self._prompt(), {"role": "user", "content": "?"}])
        except MoeoffError:  # some templates have no place for it
            self._system = old
            raise
        note("system prompt set" if self._system else "system prompt removed")

    def _save(self, file: str) -> None:
        if not file:
            raise OptionError("/save FILE: say which file")
        path = os.path.expanduser(file)
        text = json.dumps(self._prompt(), ensure_ascii=False, indent=2) + "\n"
        if os.path.isfile(path) and path != self._overwrites:
            self._overwrites = path
            return note(f"{file} exists already: the same again writes over it")
        with atomic_file(path, overwrite=path == self._overwrites) as out:
            out.write(text.encode())
        self._overwrites = ""
        note(f"{len(self._messages)} messages written to {file}")

    def _load(self, file: str) -> None:
        if not file:
            raise OptionError("/load FILE: say which file")
        saved = read_text(os.path.expanduser(file))
        try:
            texts = [(message["role"], str(message["content"])) for message in json.loads(saved)]
        except (ValueError, TypeError, KeyError, RecursionError):
            texts = []
        system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
        if [role for role, _ in texts] != ["user", "assistant"] * (len(texts) // 2) or not (texts or system):
            raise OptionError(f"{file}: no conversation, as /save writes it")
        self._system, self._messages = system, [{"role": role, "content": text} for role, text in texts]
        note(f"{len(texts)} messages read from {file}")

    def _memory(self, size: str) -> None:
        if size:
            self._server.set_memory(size)
            remark_on_memory(parse_size(size))
        s = self._server.stats()
        budget = f" of {format_size(s.budget_bytes)}" if s.budget_bytes else ""
        context = f"context {self._client.n_tokens} of {self._server.n_ctx_each} tokens"
        note(f"memory {format_size(rss())}{budget}, experts at most {format_size(s.cache_bytes)}, {context}")


def _rounded(value: Any) -> Any:
    """Return a number as people write it: the server has floats of 32 bits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _overflow(error: ContextError, has_history: bool) -> str:
    if not has_history:
        return f"this question has {error.n_tokens} tokens, the context {error.n_ctx}: shorten it, or start again with a larger -c"
    return (
        f"this conversation with the question would have {error.n_tokens} tokens, the context has {error.n_ctx}: "
        "/clear begins a new one, -c N at the start makes it larger; the question was dropped"
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


def _terminal_reader(keeps_history: bool) -> Callable[[], str]:
    """A function that reads one text from the terminal, with editing, and a history that may outlive the program."""
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
        history=_history(keeps_history),
    )
    return session.prompt


def _history(keeps: bool) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from ..system.files import cache_folder

    if not keeps:
        return InMemoryHistory()
    try:
        path = cache_folder() / "chat_history"
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # what people ask is theirs alone
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
