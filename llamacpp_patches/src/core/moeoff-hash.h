#pragma once

// The hash of slices: XXH64 (Yann Collet's, as every xxhash library computes it) of each MiB in turn.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace moeoff {

namespace xxh {

constexpr uint64_t p1 = 0x9E3779B185EBCA87u, p2 = 0xC2B2AE3D27D4EB4Fu, p3 = 0x165667B19E3779F9u,
                   p4 = 0x85EBCA77C2B2AE63u, p5 = 0x27D4EB2F165667C5u;

inline uint64_t rotl(uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }

template <typename T> inline uint64_t load(const uint8_t * p) {
    T x;
    memcpy(&x, p, sizeof(x));
    return x;
}

inline uint64_t round(uint64_t acc, uint64_t x) { return rotl(acc + x * p2, 31) * p1; }
inline uint64_t merge(uint64_t h, uint64_t acc) { return (h ^ round(0, acc)) * p1 + p4; }

inline uint64_t xxh64(const uint8_t * p, uint64_t n, uint64_t seed) {
    const uint8_t * const end = p + n;
    uint64_t              h;
    if (n >= 32) {
        uint64_t a = seed + p1 + p2, b = seed + p2, c = seed, d = seed - p1;
        do {
            a = round(a, load<uint64_t>(p));
            b = round(b, load<uint64_t>(p + 8));
            c = round(c, load<uint64_t>(p + 16));
            d = round(d, load<uint64_t>(p + 24));
            p += 32;
        } while (end - p >= 32);
        h = rotl(a, 1) + rotl(b, 7) + rotl(c, 12) + rotl(d, 18);
        h = merge(merge(merge(merge(h, a), b), c), d);
    } else {
        h = seed + p5;
    }
    h += n;
    for (; end - p >= 8; p += 8) {
        h = rotl(h ^ round(0, load<uint64_t>(p)), 27) * p1 + p4;
    }
    if (end - p >= 4) {
        h = rotl(h ^ (load<uint32_t>(p) * p1), 23) * p2 + p3;
        p += 4;
    }
    for (; p < end; p++) {
        h = rotl(h ^ (*p * p5), 11) * p1;
    }
    h = (h ^ (h >> 33)) * p2;
    h = (h ^ (h >> 29)) * p3;
    return h ^ (h >> 32);
}

} // namespace xxh

inline uint64_t hash64(const uint8_t * data, uint64_t nbytes, uint64_t seed) {
    constexpr uint64_t piece = 1 << 20;
    for (uint64_t at = 0; at < nbytes; at += piece) {
        seed = xxh::xxh64(data + at, std::min(piece, nbytes - at), seed);
    }
    return seed;
}

} // namespace moeoff
