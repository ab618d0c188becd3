#pragma once

// The threads that read slices. Each takes the most urgent request that can get a slot, and what is queued of the same
// expert and lies behind it in the file, reads it in one call without the mutex, and reports how it ended. Prefetches
// wait while the disk has as many reads as it gains from: a read that compute waits for would share its rate with them.
// The log of reads is kept here, too.

#include "moeoff-expert-table.h"
#include "moeoff-read-depth.h"

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace moeoff {

// A slice that is to be read, so that its first byte lands at dst + offset % page_size
struct slice_target {
    const moeoff_source * source;
    uint8_t *             dst;
};

// Reads slices of which each begins on the page behind the one before, of one file. Gives up once cancel is true.
// Returns 0, ECANCELED, or an errno with a message; tells whether the read went around the page cache.
using slice_reader = std::function<int(
    const slice_target *, int n, const std::atomic<bool> * cancel, bool & was_direct, std::string & message)>;

class io_threads {
  public:
    io_threads(expert_table & table, monitor & sync, const std::atomic<uint32_t> & flags)
        : table(table), sync(sync), flags(flags) {}

    // n: 0 for as many as the disk gains from. clock: in ns, read before and after each read
    void start(int n, slice_reader reader, std::function<int64_t()> clock) EXCLUDES(store_mutex);
    // after table.stop(): what is being read is read to its end, or given up
    void    stop() EXCLUDES(store_mutex);
    int32_t take_reads(moeoff_read * out, int32_t n) REQUIRES(store_mutex);
    // how many may read now
    int limit() const REQUIRES(store_mutex) { return n_fixed > 0 ? n_fixed : depth.limit(); }

  private:
    void run() EXCLUDES(store_mutex);
    void count_depth() REQUIRES(store_mutex);
    void end_read(const read_request & r, int64_t t_start, int64_t t_done, bool direct, int err,
        const std::string & message) REQUIRES(store_mutex);
    void log_read(const read_request & r, int64_t t_start, int64_t t_done, int err) REQUIRES(store_mutex);

    static constexpr size_t n_read_log = 65536; // finished reads that may wait to be taken

    expert_table &                   table;
    monitor &                        sync;
    const std::atomic<uint32_t> &    flags;   // moeoff_flag
    slice_reader                     reader;  // set before the threads start
    std::function<int64_t()>         clock;   // set before the threads start
    std::vector<std::thread>         threads; // used by start() and stop() only
    int                              n_fixed                 = 0; // set before the threads start
    bool stopping                    GUARDED_BY(store_mutex) = false;
    read_depth depth                 GUARDED_BY(store_mutex);
    int64_t busy_seen                GUARDED_BY(store_mutex) = 0; // of depth
    std::deque<moeoff_read> read_log GUARDED_BY(store_mutex);
    uint64_t n_logged                GUARDED_BY(store_mutex) = 0;
};

} // namespace moeoff
