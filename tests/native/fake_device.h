#pragma once

// A device whose memory is ordinary memory, and that can be read. What is pinned it copies only when it is waited for.
// All gates share its stages.

#include "check.h"

#include "moeoff-store.h"

#include <cstring>
#include <map>
#include <tuple>

class fake_device : public moeoff::slot_memory {
  public:
    ~fake_device() override { REQUIRE(pinned.empty()); }

    bool pin(void * data, size_t nbytes) override {
        if (on_pin) {
            on_pin();
        }
        std::lock_guard<std::mutex> lock(mutex);
        return pins && pinned.emplace((uintptr_t) data, nbytes).second;
    }
    void unpin(void * data) override {
        if (on_pin) {
            on_pin();
        }
        n_unpinned++;
        std::lock_guard<std::mutex> lock(mutex);
        REQUIRE(pinned.erase((uintptr_t) data) == 1);
    }
    void write(int32_t gate, moeoff::slot_set set, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes,
        bool is_ahead, bool is_pinned) override {
        std::lock_guard<std::mutex> lock(mutex);
        queues[is_ahead].push_back({ place_of(gate, set, matrix, slot), {}, data, nbytes, is_pinned });
        n_writes++;
        n_pinned += is_pinned;
        if (!is_pinned) {
            copy(is_ahead);
        }
    }
    void copy(int32_t gate, int32_t matrix, int32_t slot, int32_t stage, bool to_stage) override {
        std::lock_guard<std::mutex> lock(mutex);
        const place                 own    = place_of(gate, moeoff::HIGH_SLOTS, matrix, slot),
                                    staged = place_of(gate, moeoff::STAGE, matrix, stage);
        queues[false].push_back({ to_stage ? staged : own, to_stage ? own : staged, nullptr, 0, false });
        n_copies++;
    }
    void wait(int32_t, bool is_ahead) override {
        std::lock_guard<std::mutex> lock(mutex);
        copy(is_ahead);
    }
    void wait_on_device(int32_t gate) override { wait(gate, false); }
    void set_computing(int32_t, void *) override {}
    void read(int32_t gate, moeoff::slot_set set, int32_t matrix, int32_t slot, uint8_t * data,
        size_t nbytes) const override {
        std::lock_guard<std::mutex> lock(mutex);
        const auto &                bytes = slots.at(place_of(gate, set, matrix, slot));
        REQUIRE(bytes.size() == nbytes);
        memcpy(data, bytes.data(), nbytes);
    }
    void * tensor(int32_t, moeoff::slot_set, int32_t) const override { return nullptr; }

    // empty: nothing was written there
    std::vector<uint8_t> read(int32_t gate, moeoff::slot_set set, int32_t matrix, int32_t slot) {
        std::lock_guard<std::mutex> lock(mutex);
        return slots[place_of(gate, set, matrix, slot)];
    }

    bool                  pins = false; // it can
    std::function<void()> on_pin; // or unpin
    int32_t               n_stages = 1;
    std::atomic<uint64_t> n_writes { 0 }, n_pinned { 0 }, n_copies { 0 }; // the second: of the first
    std::atomic<uint64_t> n_unpinned { 0 };                           // chunks

  private:
    using place = std::tuple<int32_t, int32_t, int32_t, int32_t>;
    struct queued {
        place           to, from;
        const uint8_t * data; // nullptr: from there
        size_t          nbytes;
        bool            is_pinned;
    };

    place place_of(int32_t gate, moeoff::slot_set set, int32_t matrix, int32_t slot) const {
        return { set == moeoff::STAGE ? gate % n_stages : gate, set, matrix, slot };
    }

    void copy(bool is_ahead) {
        for (const queued & q : queues[is_ahead]) {
            REQUIRE(!q.is_pinned || is_in_pinned((uintptr_t) q.data, q.nbytes));
            if (q.data) {
                slots[q.to].assign(q.data, q.data + q.nbytes);
            } else {
                slots[q.to] = slots.at(q.from);
            }
        }
        queues[is_ahead].clear();
    }

    bool is_in_pinned(uintptr_t data, size_t nbytes) const {
        uintptr_t end = data; // of what is
        for (auto i = pinned.upper_bound(data); end < data + nbytes; i = pinned.upper_bound(end)) {
            if (i == pinned.begin() || (--i)->first + i->second <= end) {
                return false;
            }
            end = i->first + i->second;
        }
        return true;
    }

    mutable std::mutex                    mutex;
    std::map<place, std::vector<uint8_t>> slots;
    std::vector<queued>                   queues[2];
    std::map<uintptr_t, size_t>           pinned;
};
