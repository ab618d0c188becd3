#!/usr/bin/env bash
# Builds the stress test of the expert store with a sanitizer and runs it.
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
"${CXX:-g++}" -std=c++17 -O1 -g -Wall -Wextra $flags -I"$core" "$core"/*.cpp "$root/tests/native/stress_store.cpp" -o "$work/stress" -pthread
cd "$work" # the test's data file goes here
TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" ASAN_OPTIONS="detect_leaks=1" timeout "$(( ${2:-12} * 4 + 60 ))" ./stress "${2:-12}" "${3:-1}"
