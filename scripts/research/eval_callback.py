"""moeoff.Llama that shows every node of its graphs while they are computed: for benchmarks and tests, it is slow."""

import llama_cpp

import moeoff.native


class WithCallback(moeoff.Llama):
    """Calls `_watch(node, ask, user)` as llama.cpp's cb_eval does: with ask, whether the node's data is wanted; then with the data."""

    def __init__(self, *args, **kwargs):
        self._on_node = llama_cpp.ggml_backend_sched_eval_callback(self._watch)
        super().__init__(*args, **kwargs)

    @property
    def context_params(self):
        return self._context_params

    @context_params.setter
    def context_params(self, params) -> None:
        params.cb_eval = self._on_node
        self._context_params = params

    def _watch(self, node: int, ask: bool, user: object) -> bool:
        raise NotImplementedError
