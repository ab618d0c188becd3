"""A chat in twenty lines: history, streaming, Ctrl-C ends the answer. usage: chat.py
[MODEL.gguf]
"""

import sys

import moeoff

model = sys.argv[1] if len(sys.argv) > 1 else moeoff.demo_model()

with moeoff.Llama(model, memory="80%", n_ctx=256) as llm:
    messages = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        try:
            for chunk in llm.create_chat_completion(messages, max_tokens=48, stream=True):
                text = chunk["choices"][0]["delta"].get("content") or ""
                answer += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            pass  # keep what was said
        print()
        messages.append({"role": "assistant", "content": answer})
