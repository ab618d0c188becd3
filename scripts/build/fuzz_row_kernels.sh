#!/usr/bin/env bash
# Compiles the row kernels and ggml's vec_dot for a processor, with a compiler, and compares them: they have to give the same bits. Or their speed.
# PROGRAM=fuzz_tiled: ggml's tiled products instead, against sums of integers.
# usage: [CC=... CXX=...] [SANITIZE=1] [RUN=...] [TREE=...] [PROGRAM=...] fuzz_row_kernels.sh [PRODUCTS of each type|speed [COMPILER FLAG ...]]
#
#   CC=clang CXX=clang++ fuzz_row_kernels.sh 100000 -mavx2 -mfma -mf16c
#   CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ RUN="qemu-aarch64 -cpu max" fuzz_row_kernels.sh 100000 -march=armv8.2-a+dotprod+fp16
#
# Without flags: for this machine. SANITIZE: the kernels are compiled with the address and undefined-behaviour sanitizers. RUN runs a program for another
# processor. TREE: the fork's sources, as `fork.py tree` writes them, which otherwise are written anew. Only the files that the products need are
# compiled, in seconds: of the others the linker wants nothing, as no function that is called leads there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc=${CC:-gcc} cxx=${CXX:-g++}
if [ -z "${TREE:-}" ]; then
    TREE=$work/tree
    "${PYTHON:-python3}" "$root/scripts/build/fork.py" tree "$TREE" > /dev/null
fi
ggml=$(cd "$TREE/vendor/llama.cpp/ggml" && pwd) cpu=$(cd "$TREE/vendor/llama.cpp/ggml/src/ggml-cpu" && pwd)
case $("$cxx" -dumpmachine) in
    x86_64*) arch=x86 ;;
    aarch64* | arm64*) arch=arm ;;
    *) echo "there are no row kernels for $("$cxx" -dumpmachine)" >&2; exit 1 ;;
esac
mkdir "$work/objects"
cd "$work/objects"
echo '#define GGML_VERSION ""
#define GGML_COMMIT ""' > ggml-version.h # else CMake writes it
flags=(-O3 -DNDEBUG -D_GNU_SOURCE -ffunction-sections -fdata-sections -I. -I"$ggml"/{include,src,src/ggml-cpu} -I"$cpu/moeoff")
for_cpu=("${@:2}")
if [ ${#for_cpu[@]} = 0 ]; then
    for_cpu=(-march=native)
fi
ours=(-Wall -Wextra -Wno-unused-function -Wno-psabi) link=(-static) # clang's static libraries have no sanitizers
if [ -n "${SANITIZE:-}" ]; then
    ours+=(-g -fsanitize=address,undefined -fno-sanitize-recover=all) link=()
fi
theirs=("${flags[@]}" "${for_cpu[@]}" -w) # vec_dot is compiled as in a build of the whole; of what only has to be there -O1 is quicker made
"$cc" "${theirs[@]}" -O1 -c "$cpu"/{quants.c,ggml-cpu.c} "$ggml"/src/{ggml-quants.c,ggml.c} &
"$cc" "${theirs[@]}" -c "$cpu/arch/$arch/quants.c" -o arch-quants.o
"$cxx" -std=gnu++17 "${theirs[@]}" -O1 -c "$cpu/vec.cpp" "$ggml/src/ggml-threading.cpp"
program=${PROGRAM:-fuzz_row_kernels}
kernels=("$cpu/moeoff/moeoff-row-kernels.cpp")
if [ "$program" = fuzz_tiled ]; then
    kernels=("$cpu/tiled/tiled-kernel.cpp")
    ours+=(-Wno-uninitialized) # of gcc's own headers, in ggml's kernel for AVX-512
fi
"$cxx" -std=gnu++17 "${flags[@]}" "${for_cpu[@]}" "${ours[@]}" -c "${kernels[@]}" "$root/scripts/build/$program.cpp"
wait $!
"$cxx" "${ours[@]}" "${link[@]}" -Wl,--gc-sections ./*.o -pthread -ldl -lm -o fuzz
# shellcheck disable=SC2086
${RUN:-} ./fuzz "${1:-100000}"
