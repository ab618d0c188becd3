"""Slots whose prompts are saved in files and come back (`--slot-save-path`)."""

import httpx

from helpers.servers import Served


def test_a_slot_that_the_context_has_no_room_for_is_refused(demo, tmp_path):
    """Also with states of another length for each token; and the server goes on."""
    prompt = [300 + i % 2000 for i in range(700)]
    for cache in ("f16", "q8_0"):
        options = {
            "expert_memory": 2 << 20,
            "parallel": 1,
            "type_k": cache,
            "type_v": cache,
            "args": ["--slot-save-path", str(tmp_path), "--override-kv", "qwen2moe.context_length=int:4096"],
        }
        answers = []
        for n_ctx in (1024, 512):
            with Served(demo, n_ctx=n_ctx, **options) as it:
                answers.append(
                    httpx.post(f"{it.url}/completion", json={"prompt": prompt[:400], "n_predict": 4, "id_slot": 0, "temperature": 0}, timeout=300).json()[
                        "content"
                    ]
                )
                if n_ctx == 1024:
                    httpx.post(f"{it.url}/completion", json={"prompt": prompt, "n_predict": 1, "id_slot": 0}, timeout=300)
                    assert httpx.post(f"{it.url}/slots/0?action=save", json={"filename": cache}, timeout=300).json()["n_saved"] >= 700
                else:
                    refused = httpx.post(f"{it.url}/slots/0?action=restore", json={"filename": cache}, timeout=300)
                    assert refused.status_code == 400 and "Unable to restore slot: No available space" in refused.json()["error"]["message"]
                    answers.append(
                        httpx.post(f"{it.url}/completion", json={"prompt": prompt[:400], "n_predict": 4, "id_slot": 0, "temperature": 0}, timeout=300).json()[
                            "content"
                        ]
                    )
        assert len(set(answers)) == 1
