"""Stream text from a web app. run: uvicorn fastapi_stream:app   ask: curl -N 'localhost:8000/say?prompt=Hello'

One model computes one answer at a time, so requests take turns. A client that leaves
ends its answer: the generator is closed between two tokens.
"""

import os
import threading

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import moeoff

llm = moeoff.Llama(os.environ.get("MODEL", moeoff.demo_model()), memory="80%", n_ctx=256)
turn = threading.Lock()
app = FastAPI()


@app.get("/say")
def say(prompt: str, max_tokens: int = 64) -> StreamingResponse:
    def text():
        with turn:
            for chunk in llm.create_completion(prompt, max_tokens=max_tokens, stream=True):
                yield chunk["choices"][0]["text"]

    return StreamingResponse(text(), media_type="text/plain")


@app.get("/stats")
def stats() -> dict:
    return vars(llm.stats())
