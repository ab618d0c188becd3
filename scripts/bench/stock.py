"""Stock llama.cpp from the library that moeoff uses, without an expert buffer: what everything is compared with."""

import llama_cpp


class Stock(llama_cpp.Llama):
    """llama_cpp.Llama with a choice that its constructor does not offer.

    Args:
        use_extra_bufts: repacked kernels, which round differently from the plain ones that experts are computed with.
    """

    def __init__(self, path: str, use_extra_bufts: bool = False, **kwargs):
        self._extra = use_extra_bufts
        super().__init__(path, **{"use_mmap": False, "verbose": False, "n_threads": 2, "n_threads_batch": 2} | kwargs)

    @property
    def model_params(self):
        return self._params

    @model_params.setter
    def model_params(self, params):
        params.use_extra_bufts = self._extra
        self._params = params
