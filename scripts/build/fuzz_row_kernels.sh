#!/usr/bin/env bash
# Builds the CPU backend for a processor, with a compiler, and compares its row kernels with ggml's vec_dot, which has to give the same bits.
# usage: [CC=... CXX=...] [RUN=...] fuzz_row_kernels.sh [PRODUCTS of each type [CMAKE ARGUMENT ...]]
#
#   CC=clang CXX=clang++ fuzz_row_kernels.sh 100000 -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
#   CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ RUN="qemu-aarch64-static -cpu max" fuzz_row_kernels.sh 100000 \
#       -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16
#
# RUN runs a program for another processor. PATH has cmake and ninja; ggml-cpu is compiled from nothing, in minutes.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" "$root/scripts/build/fork.py" tree "$work/tree" > /dev/null
ggml=$work/tree/vendor/llama.cpp/ggml
cmake -G Ninja -S "$work/tree/vendor/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER="${CC:-gcc}" -DCMAKE_CXX_COMPILER="${CXX:-g++}" \
    -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_{COMMON,TOOLS,SERVER,TESTS,EXAMPLES}=OFF "${@:2}" > "$work/log"
ninja -C "$work/build" ggml-cpu >> "$work/log" || { tail -n 30 "$work/log" >&2; exit 1; }
"${CXX:-g++}" -std=c++17 -O2 -static -I"$ggml"/{include,src/ggml-cpu/moeoff} "$root/tests/native/fuzz_row_kernels.cpp" \
    "$work"/build/ggml/src/libggml-{cpu,base}.a -pthread -ldl -o "$work/fuzz"
# shellcheck disable=SC2086
${RUN:-} "$work/fuzz" "${1:-100000}"
