"""Complete a text within a memory budget. usage: completion.py [MODEL.gguf]"""

import sys

import moeoff

model = sys.argv[1] if len(sys.argv) > 1 else moeoff.demo_model()

with moeoff.Llama(model, memory="80%", n_ctx=256) as llm:
    reply = llm.create_completion(
        "User: How many legs have 3 cats?\nAssistant:", max_tokens=32, stop=["\n"]
    )
    print(reply["choices"][0]["text"].strip())

    stats = llm.stats()
    print(
        f"{stats.hit_rate:.0%} of the experts were in memory, {stats.bytes_read / 1e6:.0f} MB were"
        " read",
        file=sys.stderr,
    )
