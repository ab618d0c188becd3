#pragma once

// What a cache would hold that keeps the same share of every gate's experts, by decayed counts of their uses (the policy "decay"),
// if it were driven by the routers alone: no read is late in it, and nothing else is in memory. Not thread safe.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moeoff {

class simulated_cache {
  public:
    // empties it; a negative share: there is none
    void reset(float share, int32_t n_gates);
    bool is_on() const { return share >= 0.0f; }

    bool has(int32_t gate, int32_t expert) const { return (size_t) expert < gates[gate].is_in.size() && gates[gate].is_in[expert]; }
    // a token has used n experts of a gate; those that is_read leaves out are not brought in
    void use(int32_t gate, int32_t n_expert, const int32_t * experts, const uint8_t * is_read, int32_t n);

  private:
    struct row {
        std::vector<float>   count; // of uses, in units that grow instead of all counts shrinking
        std::vector<uint8_t> is_in;
        int32_t              n_in = 0;
        float                unit = 1.0f;
    };

    float            share = -1.0f;
    std::vector<row> gates;
};

} // namespace moeoff
