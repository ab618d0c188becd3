#!/usr/bin/env bash
# Builds the stress test of the expert store, and the test that lets every call fail once, with a sanitizer and runs them.
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
compile "$work"/core/*.o "$root"/tests/native/test_{faults,main}.cpp -o "$work/faults"
cd "$work" # the test's data file goes here
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" ASAN_OPTIONS="detect_leaks=1"
for test in $(sed -n 's/^TEST(\(.*\)) {/\1/p' "$root/tests/native/test_faults.cpp"); do
    ./faults "$test"
done
timeout "$(( ${2:-12} * 4 + 60 ))" ./stress "${2:-12}" "${3:-1}"
