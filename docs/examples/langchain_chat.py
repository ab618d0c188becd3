"""A chain of LangChain on a running server. needs: pip install langchain-openai. usage:
langchain_chat.py [URL]
"""

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"

llm = ChatOpenAI(base_url=url, api_key="none", model="any", temperature=0, max_tokens=48)
chain = ChatPromptTemplate.from_messages([("user", "How many legs have {number} {animal}?")]) | llm
for chunk in chain.stream({"number": 3, "animal": "cats"}):
    print(chunk.content, end="", flush=True)
print()
