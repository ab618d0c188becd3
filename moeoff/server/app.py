"""`moeoff serve`: llama_cpp's OpenAI-compatible server on `moeoff.Llama`.

Routes, schemas and streaming are those of llama_cpp.server; `moeoff.server.request_queue` stands in front of them. This module opens the model,
puts the two together and runs them until a signal comes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..binding import serve_model
from ..engine.llama import Llama
from ..errors import Cancelled, MoeoffError, OptionError, Remedy

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from fastapi import Request as HTTPRequest
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse, PlainTextResponse
    from sse_starlette.sse import AppStatus
except ModuleNotFoundError as error:
    raise OptionError(f"moeoff serve needs {error.name}, which is not installed: pip install 'moeoff[server]'") from None

from .. import __version__
from ..engine.open import open_model
from ..memory import format_size
from ..paths import demo_model
from .metrics import metrics_text
from .request_queue import RequestQueue, current_request, error_body

if TYPE_CHECKING:
    from llama_cpp import CreateCompletionResponse, CreateCompletionStreamResponse
    from starlette.types import ASGIApp

GRACE_SECONDS = 10  # for what is in flight when a signal comes


class ServedLlama(Llama):
    """Counts an answer's tokens on its request, and ends the answer when its client has gone.

    alias: what answers call the model where the request did not name one.
    """

    alias = "default"

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        request = current_request()
        request.prompt_tokens = len(tokens)
        request.answer = answer = super().generate(tokens, *args, **kwargs)
        try:
            for token in answer:
                if not self.is_end_token(token):
                    request.completion_tokens += 1
                yield token
                if request.left:
                    return
        except Cancelled as error:
            if not request.left:
                raise HTTPException(500, str(error)) from error
        except MoeoffError as error:
            raise HTTPException(500, str(error)) from error

    def create_completion(self, *args: Any, **kwargs: Any) -> CreateCompletionResponse | Iterator[CreateCompletionStreamResponse]:
        if kwargs.get("logprobs") is not None and not self.keeps_logits:
            raise HTTPException(400, "this server keeps no logits and cannot give logprobs: its operator starts it with --logprobs for that")
        kwargs["model"] = kwargs.get("model") or self.alias  # llama_cpp would say where the file is
        return super().create_completion(*args, **kwargs)


class OneModel:
    """The part of llama_cpp.server's LlamaProxy that its routes use, for a model that is open already."""

    def __init__(self, llm: ServedLlama):
        self.llm = llm

    def __call__(self, _model: str | None = None) -> Llama:
        return self.llm

    def __iter__(self) -> Iterator[str]:
        return iter([self.llm.alias])


def create_app(llm: ServedLlama, *, api_key: str | None = None, cors: Sequence[str] = ()) -> tuple[ASGIApp, RequestQueue]:
    """The application, and the request queue in front of it. One at a time in a process: llama_cpp's routes keep their model in a global."""
    proxy = OneModel(llm)
    routes = serve_model(proxy)  # without a key: that is the request queue's business

    app = FastAPI(title="moeoff", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(routes.router)
    # llama_cpp's lock would make the list of models wait for answers; the request queue lets one request at a time to the model
    app.dependency_overrides[routes.get_llama_proxy] = lambda: proxy
    request_queue = RequestQueue(app, llm, api_key)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(llm.stats(), request_queue), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(HTTPException)
    async def openai_error(_request: HTTPRequest, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code)

    guarded = CORSMiddleware(request_queue, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"]) if cors else request_queue
    return guarded, request_queue


class Server(uvicorn.Server):
    """Tells the request queue about the signal before it waits for the connections."""

    def __init__(self, config: uvicorn.Config, request_queue: RequestQueue):
        super().__init__(config)
        self.request_queue = request_queue

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.request_queue.close()
        super().handle_exit(sig, frame)


def _bind(host: str, port: int) -> socket.socket:
    """Before the model is loaded: a port that is taken should not take a minute to be found so."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise OptionError(f"cannot listen on {host}:{port}: {error.strerror}", Remedy.OTHER_ADDRESS) from None
    return sock


def serve(
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    api_key: str | None = None,
    alias: str | None = None,
    cors: Sequence[str] = (),
    logprobs: bool = False,
    **options: Any,
) -> None:
    """Serves until SIGINT, which is raised again as KeyboardInterrupt, or SIGTERM; see `moeoff serve --help` for the options.

    Args:
        **options: what `moeoff.engine.open.open_model` takes.

    Raises:
        MoeoffError: the model, the budget, an option or the address is no good.
    """
    model = model or demo_model()
    with _bind(host, port) as sock:
        llm = open_model(ServedLlama, model, logits_all=logprobs, **options)
        with llm:
            llm.alias = alias or os.path.basename(model).removesuffix(".gguf")
            app, request_queue = create_app(llm, api_key=api_key, cors=cors)
            config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_SECONDS)
            AppStatus.enable_automatic_graceful_drain = False  # the request queue ends streams at a token, with their last chunk
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when all is done
            name, number = sock.getsockname()[:2]
            url = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
            print(f"serving {model} on {url}/v1, experts in {format_size(llm.plan.arena)}; Ctrl-C ends", file=sys.stderr, flush=True)
            Server(config, request_queue).run(sockets=[sock])
