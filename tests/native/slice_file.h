#pragma once

// A file whose bytes tell their own place, so that a test can check every byte of every slice.

#include "check.h"

#include "moeoff-store.h"

#include <cstdint>
#include <string>
#include <vector>

#include <unistd.h>

inline uint8_t byte_at(uint64_t offset) { return (uint8_t) ((offset * 2654435761u) >> 13); }

class slice_file {
  public:
    explicit slice_file(size_t size) {
        char name[] = "slices-XXXXXX";
        const int fd = mkstemp(name);
        REQUIRE(fd >= 0);
        std::vector<uint8_t> bytes(size);
        for (size_t i = 0; i < size; i++) {
            bytes[i] = byte_at(i);
        }
        REQUIRE(write(fd, bytes.data(), size) == (ssize_t) size);
        close(fd);
        path = name;
    }
    ~slice_file() { unlink(path.c_str()); }

    std::string path;
};

enum slice_state : uint8_t { ABSENT, QUEUED, LOADING, READY, FAILED };

inline slice_state state_of(const moeoff::slice & s) {
    const auto has = [&s](const moeoff::matrix_set & set) { return __atomic_load_n(&set, __ATOMIC_RELAXED) & moeoff::set_of(s.matrix); };
    return s.is_ready() ? READY : s.has_failed() ? FAILED : has(s.of.loading) ? LOADING : has(s.of.queued) ? QUEUED : ABSENT;
}

// a tensor of a layer, as the model's loader would add it
inline moeoff_tensor_info tensor_info(int layer, int matrix, int n_expert) {
    moeoff_tensor_info info = {};
    snprintf(info.name, sizeof(info.name), "blk.%d.%d", layer, matrix);
    info.layer  = layer;
    info.matrix = matrix;
    info.ne[2]  = n_expert;
    return info;
}
