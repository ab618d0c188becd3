#pragma once

// The arena: page-aligned slots for experts, one size class for each size, a bound in bytes over all classes together.
// Address space for every slot is reserved once; memory is committed slot by slot and given back slot by slot, so the
// bound can move at any time and classes can lend bytes to each other. That is dear, because the system zeroes each
// page that comes back and slots move: up to spare_bytes() of free slots wait for the next of their own class. After
// reserve() nothing allocates. Not thread safe.
//
// A large arena asks for huge pages, into which a direct read costs half the processor time. A part of one cannot be
// given back: the system counts it whole for as long as something of it is used. So the slots of a class that have
// memory are its first ones, a class gives back its last slot, whose bytes move into a free one before, and memory goes
// and comes in whole huge pages, which count as committed. Only the last one of a class may be cut, or be made of
// ordinary pages from the start, where the limit leaves no room for it.
//
// A device reads this memory without the processor's help if it is pinned: in chunks, each before its first
// begin_read(). That takes milliseconds, and needs no lock: begin_pin() says what is to be pinned, and end_pin() takes
// the outcome. What is pinned stays with its pages: a chunk is unpinned before a page of it is given back, also without
// a lock, and no page of it is given back while somebody reads it.
//
// A slot can be written to from its first use on. A system that promises no more memory than it has
// (vm.overcommit_memory=2) therefore counts the slots that were in use, not the address space. A forked process has
// none of it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace moeoff {

class arena {
  public:
    class pinner {
      public:
        virtual ~pinner()                            = default;
        virtual bool pin(void * data, size_t nbytes) = 0; // false: it cannot
        virtual void unpin(void * data)              = 0;
    };
    ~arena();

    // of x86-64, and of ARM with ordinary pages of 4 KiB; tests set it
    static uint64_t huge_page;
    // what a slice takes of a slot: it may begin anywhere inside its first page
    static uint64_t slot_bytes(uint64_t slice_bytes);

    // of the system, which may be larger than ours: what a slot takes, so that its memory can go alone
    static uint64_t whole_pages(uint64_t bytes);
    static uint64_t system_page;                      // tests set it
    static uint64_t pin_bytes;                        // of a chunk; it begins and ends at multiples. Tests set it

    // room for n slots of so many bytes; returns the class. Before reserve()
    int add_class(uint64_t slot_bytes, uint32_t n);
    // Moves a slot that holds nothing to another one of the class. false: the slot must stay, or its bytes have to be
    // copied first, by whoever has the time for that: begin_move(), the copy, end_move()
    using slot_mover = std::function<bool(int cls, int32_t from, int32_t to)>;
    // false: no address space, or no memory for two slots of each class. Without a mover all slots stay where they are
    bool reserve(uint64_t limit_bytes, slot_mover move = {});
    // before reserve(): slots are counted, in ordinary pages, and have no memory
    void simulate() { is_simulated = true; }

    void     set_limit(uint64_t bytes) { limit = bytes; }
    uint64_t limit_bytes() const { return limit; }
    uint64_t committed_bytes() const { return committed; }
    bool     exceeds_limit() const { return committed > limit; }
    uint64_t peak_bytes() const { return peak; }
    uint64_t full_bytes() const; // all slots of all classes
    uint64_t free_bytes() const; // of committed_bytes, behind slots that are not taken, or are being copied into
    uint64_t ahead_bytes() const; // of committed_bytes, in huge pages behind the last slot of each class
    // so many bytes more would fit if the free slots could go, and the last take() or trim() has met a last slot that
    // must stay for now
    bool is_blocked(uint64_t extra = 0) const {
        return must_stay && committed + extra + classes.size() * huge_page <= limit + free_bytes();
    }
    // many: a layer's experts come at once, and the next layer's may have another size: in its turn each class takes
    // what the other has given
    uint64_t spare_bytes(bool many = false) const { return limit / (many ? 16 : 128); }
    uint64_t slot_bytes_of(int cls) const { return classes[cls].stride; }
    size_t   n_classes() const { return classes.size(); }
    uint32_t n_slots(int cls) const { return classes[cls].n; }

    // A slot of the class within the limit, and within what the system promises; -1: something must be evicted. Free
    // slots of other classes are taken for it if they are more than the spare ones, or if it borrows
    int32_t take(int cls, bool borrows = false, bool many = false);
    // the slot's bytes stay committed for the next take() of its class
    void give(int cls, int32_t slot);
    // gives free slots back to the system until committed + extra fits the limit; true if it does. To cut huge pages is
    // a last resort
    bool trim(uint64_t extra = 0, bool cuts = false);
    // A free slot to copy the bytes of the class' last slot into, so that the last one can go; -1: `from` is not the
    // last any more, or no slot is free
    int32_t begin_move(int cls, int32_t from);
    // has_moved: `from` is free now, else `to` is
    void end_move(int cls, int32_t from, int32_t to, bool has_moved);

    // Whether memory is pinned. Everything is unpinned and nobody reads
    void set_pinning(bool pins);
    struct pin_range {
        uint8_t * data;
        size_t    nbytes, chunk;
        int       cls;
    };
    // A chunk of the slot's memory that is to be pinned before begin_read(), and is not given back until end_pin();
    // false: there is none, or another thread is at it
    bool begin_pin(int cls, int32_t slot, pin_range & range);
    void end_pin(const pin_range & range, bool is_pinned);
    // The pinned chunk that the last take() or trim() has met, or any that is pinned: it is to be unpinned before
    // end_unpin(). false: there is none, or somebody is at it
    bool begin_unpin(pin_range & range, bool any = false);
    void end_unpin(const pin_range & range);
    bool wants_unpin() const { return to_unpin.cls >= 0; }
    bool is_pinned() const; // something of it is, or is being
    // The slot's memory is pinned until end_read(); false: it is not, and nothing has begun
    bool begin_read(int cls, int32_t slot);
    void end_read(int cls, int32_t slot);

    uint8_t * data(int cls, int32_t slot) const { return classes[cls].base + (uint64_t) slot * classes[cls].stride; }

  private:
    struct chunk {
        enum : uint8_t { UNPINNED, PINNING, PINNED, REFUSED } state = UNPINNED;
        uint16_t n_readers                                          = 0;
    };
    struct size_class {
        uint64_t bytes() const { return stride * n; }
        uint64_t ahead() const { return grown - stride * n_used; }

        uint64_t stride = 0;
        uint32_t n      = 0;
        // of the lowest addresses, that have been in use, or have memory: free slots above are never taken before them
        uint32_t             n_used = 0;
        uint64_t             open   = 0; // bytes from base on that may be written to
        uint64_t             grown  = 0; // of them, behind these slots, and in the huge pages that they reach into
        uint8_t *            base   = nullptr;
        std::vector<int32_t> committed_free; // memory behind it, holds nothing
        std::vector<int32_t> place; // of each slot in committed_free; -1: it is not there
        std::vector<int32_t> uncommitted; // address space only
        std::vector<chunk>   chunks;
    };
    // the chunks that bytes from ... to of the class lie in, as [first, last); and where one begins
    static size_t first_chunk(const size_class & c, uint64_t from) {
        return (size_t) (((uintptr_t) c.base + from) / pin_bytes - (uintptr_t) c.base / pin_bytes);
    }
    static size_t   last_chunk(const size_class & c, uint64_t to) { return first_chunk(c, to - 1) + 1; }
    static uint64_t begin_of(const size_class & c, size_t i);
    bool            can_give_back(int cls, uint64_t from, uint64_t to); // false: somebody reads it, or it is pinned
    pin_range       range_of(int cls, size_t chunk) const;
    // bytes to be committed for it, and for the huge page in which it ends
    uint64_t needs(const size_class & c, int32_t slot, bool whole) const;
    bool     grow(size_class & c, int32_t slot); // so that the slot can be used for the first time
    int32_t  take_free(size_class & c, int32_t place);
    bool     give_back_slot(int cls); // a free one; false: the last one must stay
    void     give_back(size_class & c, uint64_t begin, uint64_t end);
    bool     open_until(size_class & c, uint64_t end);

    std::vector<size_class> classes;
    slot_mover              move;
    bool                    pins         = false;
    pin_range               to_unpin     = { nullptr, 0, 0, -1 }; // before its memory can go
    bool                    is_simulated = false;
    bool                    is_huge      = false;
    bool      must_stay    = false; // the last slot of a class, when free ones before it were to be given back
    uint8_t * region       = nullptr;
    uint64_t  region_bytes = 0;
    uint64_t  limit        = 0;
    uint64_t  committed    = 0;
    uint64_t  in_move      = 0; // of committed: slots that are being copied into
    uint64_t  peak         = 0;
};

} // namespace moeoff
