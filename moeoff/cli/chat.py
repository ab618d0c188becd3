"""The interactive chat of `moeoff run`.

The conversation is a list of messages. The server renders all of it for each question
and processes only the tokens that its KV cache lacks. A failed question is dropped.
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
# seed and stop cannot be changed during a chat
_SETTINGS = {
    name: line for name, line in table_of(Sampling).items() if name not in ("seed", "stop")
}
_FIELDS = {"temp": "temperature"}  # request fields whose names differ from the option's

HELP = f"""\
/help              show this list
/clear             clear the conversation; the system prompt stays
/regen             answer the last question again
/system TEXT       set the system prompt; without TEXT show it; /system - removes it
/set NAME VALUE    set a sampling parameter, e.g. /set temp 0.2; without NAME show all
/think off         answer without thinking first, if the model supports it; /think on
/save FILE         save the conversation as JSON
/load FILE         load a saved conversation
/memory SIZE       set the memory budget, e.g. 6G or 80%; without SIZE show it, and the context
/exit              leave, as Ctrl-D does

Several lines: Ctrl-J, or a backslash before Enter, begins a new line; {QUOTES} begins and ends a
text of several lines. Ctrl-C stops an answer, or clears the line. Type a space before a question
that begins with /."""


def is_open(text: str) -> bool:
    """Return True if Enter after this text begins a new line instead of sending it."""
    text = text.lstrip()
    return text.startswith(QUOTES) and QUOTES not in text[len(QUOTES) :]


def unquote(text: str) -> str:
    text = text.strip()
    if text.startswith(QUOTES):
        text = text[len(QUOTES) :].removesuffix(QUOTES).strip("\n")
    return text


class Chat:
    """A conversation with a user at a terminal.

    Args:
        is_transcript: True if the model has no chat template.
        read: Function that returns the next line, or raises KeyboardInterrupt for
            Ctrl-C and EOFError for Ctrl-D.
        history: True to keep the lines typed in a file.
    """

    def __init__(
        self,
        client: Client,
        system: str | None = None,
        is_transcript: bool = False,
        read: Callable[[], str] | None = None,
        history: bool = True,
    ):
        self._client, self._server = client, client.server
        self._is_transcript = is_transcript
        self._read = read or _terminal_reader(history)
        self._terminal_mode = contextlib.nullcontext if read else typed_ahead
        self._system = system
        self._overwrites = ""  # existing file for which /save awaits confirmation
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
        """Read and answer until the user leaves. `share` notes a default budget."""
        engine = self._server.engine
        name, budget = os.path.basename(engine.config.model_path), engine.plan.budget
        memory = f", {format_size(budget)} of memory{share}" if budget else ""
        n_ctx = self._server.n_ctx_each
        note(f"{name}: context of {n_ctx} tokens{memory}. /help lists the commands, Ctrl-D leaves.")
        if self._is_transcript:
            note("the model has no chat template, chatting in a plain transcript (--chat-template)")
        with self._terminal_mode():
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
            return note(f"{name}: unknown command; /help lists all")
        try:
            command(argument)
        except MoeoffError as error:
            flags = {name: (f"/set {name}", line.metavar) for name, line in _SETTINGS.items()}
            note(in_flags(error, flags | {"memory": ("/memory", "SIZE")}))
        except OSError as error:
            note(str(error))

    def _prompt(self) -> list[dict[str, Any]]:
        return (
            [{"role": "system", "content": self._system}] if self._system else []
        ) + self._messages

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
            self._messages.pop()  # stopped before the first word
        self._client.say_remarks()
        note(("stopped | " if answer.finish_reason == "cancelled" else "") + answer.summary())
        if (
            answer.finish_reason == "length"
            and self._client.n_tokens >= answer.n_ctx
            and not self._server.engine.config.context_shift
        ):
            way_out = "/clear the conversation, or restart with a larger -c or --context-shift"
            note(f"the context of {answer.n_ctx} tokens is full: {way_out}")

    def _help(self, _argument: str) -> None:
        print(HELP)

    def _clear(self, _argument: str) -> None:
        self._messages.clear()
        note("conversation cleared")

    def _regenerate(self, _argument: str) -> None:
        if not self._messages:
            return note("there is no question yet")
        before = list(self._messages)
        del self._messages[-2:]
        self._ask(before[-2]["content"])
        if len(self._messages) < len(before):
            self._messages = before

    def _set_sampling(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if name and (name not in _SETTINGS or not value):
            raise OptionError(
                f"/set NAME VALUE: expected a NAME of {', '.join(_SETTINGS)}, got {argument!r}"
            )
        settings = self._client.settings
        if name:
            settings[_FIELDS.get(name, name)] = _SETTINGS[name].read(value)
        used = self._client.defaults() | settings
        note(
            ", ".join(
                f"{name} {line.spell(_rounded(used[_FIELDS.get(name, name)]))}"
                for name, line in _SETTINGS.items()
            )
        )

    def _think(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise OptionError(f"/think: expected on or off, got {argument!r}")
        self._client.settings["chat_template_kwargs"] = {"enable_thinking": argument == "on"}
        note(f"thinking {argument}, if the model's template supports it")

    def _set_system(self, text: str) -> None:
        if not text:
            return note(
                f"system prompt: {self._system}" if self._system else "there is no system prompt"
            )
        old, self._system = self._system, None if text == "-" else unquote(text)
        try:
            self._client.check([*self._prompt(), {"role": "user", "content": "?"}])
        except MoeoffError:  # some templates refuse system prompts
            self._system = old
            raise
        note("system prompt set" if self._system else "system prompt removed")

    def _save(self, file: str) -> None:
        if not file:
            raise OptionError("/save: expected FILE, got nothing")
        path = os.path.expanduser(file)
        text = json.dumps(self._prompt(), ensure_ascii=False, indent=2) + "\n"
        if os.path.isfile(path) and path != self._overwrites:
            self._overwrites = path
            return note(f"{file} exists: repeat the command to overwrite it")
        with atomic_file(path, overwrite=path == self._overwrites) as out:
            out.write(text.encode())
        self._overwrites = ""
        note(f"{len(self._messages)} messages written to {file}")

    def _load(self, file: str) -> None:
        if not file:
            raise OptionError("/load: expected FILE, got nothing")
        saved = read_text(os.path.expanduser(file))
        try:
            texts = [(message["role"], str(message["content"])) for message in json.loads(saved)]
        except (ValueError, TypeError, KeyError, RecursionError):
            texts = []
        system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
        if [role for role, _ in texts] != ["user", "assistant"] * (len(texts) // 2) or not (
            texts or system
        ):
            raise OptionError(f"{file}: expected a conversation written by /save")
        self._system, self._messages = (
            system,
            [{"role": role, "content": text} for role, text in texts],
        )
        note(f"{len(texts)} messages read from {file}")

    def _memory(self, size: str) -> None:
        if size:
            self._server.set_memory(size)
            remark_on_memory(parse_size(size))
        s = self._server.stats()
        budget = f" of {format_size(s.budget_bytes)}" if s.budget_bytes else ""
        context = f"context {self._client.n_tokens} of {self._server.n_ctx_each} tokens"
        note(
            f"memory {format_size(rss())}{budget}, experts at most {format_size(s.cache_bytes)},"
            f" {context}"
        )


def _rounded(value: Any) -> Any:
    """Round a float32 of the server to the digits that a user typed."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _overflow(error: ContextError, has_history: bool) -> str:
    what = "the conversation with this question" if has_history else "the question"
    way_out = "/clear begins a new one" if has_history else "shorten it"
    way_out += ", or restart with a larger -c; the question was dropped"
    return f"{what} has {error.n_tokens} tokens, the context {error.n_ctx}: {way_out}"


@contextlib.contextmanager
def typed_ahead() -> Iterator[None]:
    """Queue lines typed during an answer instead of echoing them into the answer."""
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

    names = WordCompleter(
        [line.split()[0] for line in HELP.splitlines() if line.startswith("/")], sentence=True
    )
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
        # private to the user
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
