#!/usr/bin/env bash
# Compiles ggml and our ops with the address sanitizer, and computes with fewer threads than were planned: a work area that is too small is then found.
# usage: [TREE=...] fewer_threads.sh PYTHON      an interpreter that has moeoff and its tests' requirements; TREE as for fuzz_row_kernels.sh
#
# The other libraries are the installed ones. The thread sanitizer would find OpenMP's own threads, which it cannot follow.
set -euo pipefail

python=$(realpath -s "${1:?usage: fewer_threads.sh PYTHON}")
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${TREE:-}" ]; then
    TREE=$work/tree
    "$python" "$root/scripts/build/fork.py" tree "$TREE" > /dev/null
fi
flags=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON -DGGML_SANITIZE_ADDRESS=ON -DLLAMA_OPENSSL=OFF)
for part in COMMON TOOLS TESTS EXAMPLES SERVER; do
    flags+=("-DLLAMA_BUILD_$part=OFF")
done
cmake -S "$TREE/vendor/llama.cpp" -B "$work/ggml" "${flags[@]}" > /dev/null
cmake --build "$work/ggml" --target ggml --parallel "$(nproc)" > /dev/null
cp -r "$("$python" -c 'import importlib.util as u; print(u.find_spec("llama_cpp").submodule_search_locations[0])')/lib" "$work/lib"
cp "$work"/ggml/bin/*.so "$work/lib/"
cd "$root"
LD_PRELOAD=$("${CC:-gcc}" -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 LLAMA_CPP_LIB_PATH=$work/lib \
    "$python" -m pytest -q tests/native/test_attention.py -k fewer_threads_than_planned
