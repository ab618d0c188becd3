#!/usr/bin/env bash
# The trial on a machine with a GPU: offline, with a driver and any Python from 3.10 to 3.13, as any user. What it does and how: gpu_trial.py --help.
# usage: gpu_trial.sh [--minutes N] [--fake | --small] [STEP...]     in the folder that the archive was unpacked in, or in a checkout that is installed
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ ! -d "$here/site" ]; then # a checkout
    exec "${PYTHON:-python3}" "$here/gpu_trial.py" "$@"
fi
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    version=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null) || continue
    [ -d "$here/numpy-$version" ] || continue
    tree=$here/tree
    export PYTHONPATH="$tree:$here/numpy-$version:$here/site" MOEOFF_CACHE="$here/cache" PYTHONNOUSERSITE=1
    exec "$python" "$tree/scripts/bench/gpu_trial.py" "$@"
done
echo "No Python that the archive has numpy for: $(cd "$here" && echo numpy-*); name one with PYTHON=..." >&2
exit 1
