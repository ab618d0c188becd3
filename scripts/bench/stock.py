"""Stock llama.cpp from the library that moeoff uses, with the options that the benchmarks and tests take for it."""

from moeoff.binding import StockLlama


class Stock(StockLlama):
    """Plain kernels by default: repacked ones round differently from those that experts are computed with."""

    def __init__(self, path: str, use_extra_bufts: bool = False, **kwargs):
        super().__init__(path, use_extra_bufts=use_extra_bufts, **{"use_mmap": False, "verbose": False, "n_threads": 2, "n_threads_batch": 2} | kwargs)
