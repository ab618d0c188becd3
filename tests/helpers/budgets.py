"""The memory that a model needs in a process of its own, as its refusal says: one
machine's libraries and threads take more than another's.
"""

from __future__ import annotations

import json
import re

from helpers.processes import run_python

_REFUSED = """
import json, sys, moeoff
try:
    moeoff.Llama(sys.argv[1], memory="1M", **json.loads(sys.argv[2]))
except moeoff.BudgetError as error:
    print(error)
"""


def needed(model: str, **options) -> int:
    """MiB that are enough for `moeoff.Llama`: up to 16 of them, which its libraries may
    still take, go to experts.
    """
    return named(run_python(_REFUSED, model, json.dumps(options)))


def named(refusal: str) -> int:
    """MiB that a refusal names as enough."""
    return int(re.search(r"this\s+model\s+needs\s+(\d+)\s+MiB", refusal)[1]) + 1
