"""macOS's questions about memory, asked of a library with the interface of its system library; nothing here has run on a Mac."""

import fcntl
import os
import resource
import shutil
import subprocess
import sys

import pytest

from moeoff import OptionError, darwin, memory
from moeoff.budget.disk_probe import direct_io, probe

CC = os.environ.get("CC", "cc")
pytestmark = pytest.mark.skipif(not shutil.which(CC), reason="no C compiler")

# struct mach_task_basic_info and the two functions, as the system's headers declare them
SYSTEM = """
#include <stdint.h>
#include <string.h>
struct info { uint64_t virtual_size, resident_size, resident_size_max; int32_t user_time[2], system_time[2], policy, suspend_count; };
unsigned mach_task_self_ = 4711;
int task_info(unsigned task, unsigned flavor, void * out, uint32_t * count) {
    if (task != 4711 || flavor != 20 || *count != sizeof(struct info) / 4) return 4;  // KERN_INVALID_ARGUMENT
    struct info info = { 9ull << 30, 3ull << 30, 5ull << 30 };
    memcpy(out, &info, sizeof info);
    return 0;
}
int sysctlbyname(const char * name, void * old, size_t * size, void * new_value, size_t new_size) {
    if (!strcmp(name, "hw.memsize") && *size == 8) { *(uint64_t *) old = 16ull << 30; return 0; }
    if (!strcmp(name, "kern.memorystatus_level") && *size == 4) { *(int *) old = LEVEL; return 0; }
    return -1;
}
"""


@pytest.fixture
def mac(tmp_path, monkeypatch):
    def system(level: str = "25") -> None:
        library = tmp_path / "libSystem.so"
        subprocess.run([CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=SYSTEM.replace("LEVEL", level), text=True, check=True)
        monkeypatch.setattr(darwin, "LIBRARY", str(library))
        monkeypatch.setattr(sys, "platform", "darwin")
        darwin._library.cache_clear()

    yield system
    darwin._library.cache_clear()


def test_memory_of_the_process_and_the_machine(mac):
    mac()
    assert memory.rss() == 3 << 30
    assert memory.available() == (4 << 30) + (3 << 30)
    assert memory.parse_size("50%") == (7 << 30) // 2
    assert memory.peak_rss() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes there, and not KiB


def test_a_system_that_does_not_say_needs_a_budget(mac):
    mac("0; return -1")
    with pytest.raises(OptionError, match="state a budget"):
        memory.available()


def test_reads_around_the_cache_are_a_property_of_the_descriptor(tmp_path, monkeypatch):
    """F_NOCACHE, for which any command stands in that this kernel takes; one that it does not take is a disk with buffered reads only."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not direct_io(path)
    monkeypatch.setattr(fcntl, "F_NOCACHE", fcntl.F_SETFD, raising=False)
    assert direct_io(path)
    assert probe(path, 1 << 16, seconds=0.05).direct_io
