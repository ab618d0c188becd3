#pragma once

// A device whose memory is ordinary memory, and that can be read.

#include "check.h"

#include "moeoff-store.h"

#include <cstring>
#include <map>
#include <tuple>

class fake_device : public moeoff::slot_memory {
  public:
    void write(int32_t gate, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes) override {
        std::lock_guard<std::mutex> lock(mutex);
        slots[{ gate, matrix, slot }].assign(data, data + nbytes);
        n_writes++;
    }
    void wait(int32_t) override {}
    void wait_on_device(int32_t) override {}
    void set_computing(int32_t, void *) override {}
    void read(int32_t gate, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const override {
        std::lock_guard<std::mutex> lock(mutex);
        const auto & bytes = slots.at({ gate, matrix, slot });
        REQUIRE(bytes.size() == nbytes);
        memcpy(data, bytes.data(), nbytes);
    }
    void * tensor(int32_t, int32_t) const override { return nullptr; }

    // empty: nothing was written there
    std::vector<uint8_t> read(int32_t gate, int32_t matrix, int32_t slot) {
        std::lock_guard<std::mutex> lock(mutex);
        return slots[{ gate, matrix, slot }];
    }

    std::atomic<uint64_t> n_writes {0};

  private:
    mutable std::mutex mutex;
    std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<uint8_t>> slots;
};
