"""Fault injection: one program, with a command for each kind of fault.
docs/results/reliability.md

usage: faults.py nth|files|objects|kill|disk|http|advisories [OPTION ...]     --help says what each does

Each tells what it has found in a table, which --json keeps, and ends with exit code 1
if something is not as it must be.
"""

from __future__ import annotations

import advisories
import damaged
import disk
import hostile_http
import kill
import nth_fault
import objects
from common import main

# each has put its own there
COMMANDS = (advisories, damaged, disk, hostile_http, kill, nth_fault, objects)

if __name__ == "__main__":
    main()
