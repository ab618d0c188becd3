"""A conversation in LlamaIndex on a running server. needs: pip install
llama-index-llms-openai-like. usage: llamaindex_chat.py [URL]
"""

import sys

from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"

llm = OpenAILike(
    model="any", api_base=url, api_key="none", is_chat_model=True, temperature=0, max_tokens=48
)
chat = SimpleChatEngine.from_defaults(llm=llm)
for question in ("How many legs have 3 cats?", "And 4 cats?"):
    for text in chat.stream_chat(question).response_gen:
        print(text, end="", flush=True)
    print()
