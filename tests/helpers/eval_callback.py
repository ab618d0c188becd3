"""Models that show every node of their graphs while they are computed: for tests, it is
slow.
"""

import llama_cpp


class WithCallback:
    """A mix-in before a class of `moeoff.llamacpp.llama` that calls
    `_watch(node, ask, user)` as llama.cpp's cb_eval does: with ask to learn whether the
    node's data is wanted, then with the data.
    """

    def __init__(self, *args, **kwargs):
        self._on_node = llama_cpp.ggml_backend_sched_eval_callback(self._watch)
        super().__init__(*args, **kwargs)

    def _before_load(self) -> None:
        super()._before_load()
        self.context_params.cb_eval = self._on_node

    def _watch(self, node: int, ask: bool, user: object) -> bool:
        raise NotImplementedError
