#!/usr/bin/env bash
# Builds the stress test of the expert store with a sanitizer and runs it; with the address sanitizer also the tests that let every call fail once.
# usage: native_stress.sh thread|address [SECONDS] [SEED]
set -euo pipefail

sanitizer=${1:?usage: native_stress.sh thread|address [SECONDS] [SEED]}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

flags="-fsanitize=$sanitizer"
if [ "$sanitizer" = address ]; then
    flags="-fsanitize=address,undefined -fno-sanitize-recover=all"
fi
core=$root/llamacpp_patches/src/core
# shellcheck disable=SC2086
compile() { "${CXX:-g++}" -std=c++17 -O1 -g -Wall -Wextra $flags -I"$core" -I"$root/tests/native" "$@" -pthread -ldl; }
mkdir "$work/core"
(cd "$work/core" && compile -c "$core"/*.cpp)
compile "$work"/core/*.o "$root/tests/native/stress_store.cpp" -o "$work/stress"
cd "$work" # the tests' data files go here
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" ASAN_OPTIONS="detect_leaks=1"
if [ "$sanitizer" = address ]; then # the other one stands before libc's functions itself, and so do these tests
    compile "$work"/core/*.o "$root"/tests/native/test_{faults,main}.cpp -o "$work/faults"
    for test in $(sed -n 's/^TEST(\([a-z0-9_]*\)).*/\1/p' "$root/tests/native/test_faults.cpp"); do
        ./faults "$test"
    done
fi
timeout "$(( ${2:-12} * 4 + 60 ))" ./stress "${2:-12}" "${3:-1}"
