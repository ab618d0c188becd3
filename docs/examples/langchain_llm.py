"""LangChain's LlamaCpp wrapper on a moeoff model. needs: pip install langchain-community. usage: langchain_llm.py [MODEL.gguf]

The wrapper always builds a `llama_cpp.Llama` of its own while it validates its fields, which would load the whole file.
`model_construct` skips that step, so the client can be ours; everything after it is the wrapper's own code.
"""

import sys

from langchain_community.llms import LlamaCpp

import moeoff

model = sys.argv[1] if len(sys.argv) > 1 else moeoff.demo_model()

with moeoff.Llama(model, memory="80%", n_ctx=256) as client:
    llm = LlamaCpp.model_construct(client=client, model_path=model, max_tokens=32, temperature=0.0, streaming=False)
    print(llm.invoke("User: How many legs have 3 cats?\nAssistant:", stop=["\n"]).strip())
