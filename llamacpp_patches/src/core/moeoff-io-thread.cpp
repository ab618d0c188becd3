#include "moeoff-io-thread.h"

#include "moeoff-event-driver.h"

#include <algorithm>
#include <cerrno>
#include <new>

namespace moeoff {

void io_threads::start(int n, slice_reader r, std::function<int64_t()> c) {
    reader  = std::move(r);
    clock   = std::move(c);
    n_fixed = n;
    n       = n > 0 ? n : read_depth::most;
    threads.reserve((size_t) n);
    for (int i = 0; i < n; i++) {
        threads.emplace_back([this] { run(); });
    }
}

void io_threads::stop() {
    {
        store_lock lock(sync);
        stopping = true;
        sync.advance_for_all(sync.work);
    }
    for (auto & t : threads) {
        t.join();
    }
    threads.clear();
}

// behind a change of the number under way
void io_threads::count_depth() {
    table.allow_reads(depth.now() >= limit() ? DEMAND + 1 : depth.has_room() ? PREFETCH : GATE);
    table.counters().disk_busy_ns += (uint64_t) (depth.busy_ns() - busy_seen);
    busy_seen = depth.busy_ns();
}

void io_threads::run() {
    name_thread("moeoff-io");
    store_lock     lock(sync);
    moeoff_stats & stats = table.counters();
    while (!stopping) {
        read_request r[files::max_ranges];
        slice_target to[files::max_ranges];
        if (table.make_way(lock, flags.load(std::memory_order_relaxed) & MOEOFF_FLAG_KEEP)) {
            continue;
        }
        if (!table.next_read(r[0])) {
            if (!table.must_make_way()) {
                lock.sleep(sync.work);
            }
            continue;
        }
        const int64_t           t0    = clock();
        const read_depth::start began = depth.begin(t0);
        count_depth();
        int      n      = 0;
        uint64_t nbytes = 0;
        bool     more   = true;
        while (more) {
            const read_request & last = r[n];
            to[n++]                   = { &table.source_of(*last.of, last.matrix), table.destination(last) };
            nbytes += to[n - 1].source->nbytes;
            stats.queue_wait_ns += (uint64_t) (t0 - last.of->t_queued[(size_t) last.matrix]);
            more = n < files::max_ranges && table.next_behind(last, r[n]);
        }
        table.wake_workers(); // the next, if there is more
        lock.unlock();

        bool        direct = false;
        std::string message;
        int         err;
        try {
            err = reader(to, n, &r[0].of->cancel, direct, message);
        } catch (const std::bad_alloc &) {
            err     = ENOMEM;
            message = "out of memory"; // short enough to be stored in the string itself
        }
        const int64_t t1 = clock();

        lock.lock();
        depth.end(t1, began, err == 0 ? nbytes : 0);
        count_depth();
        for (int i = 0; i < n; i++) {
            end_read(r[i], t0, t1, direct, err, message);
        }
    }
}

void io_threads::end_read(
    const read_request & r, int64_t t_start, int64_t t_done, bool direct, int err, const std::string & message) {
    moeoff_stats & stats = table.counters();
    stats.reads++;
    stats.direct_reads += direct;
    if (err == 0) {
        const uint64_t nbytes = table.source_of(*r.of, r.matrix).nbytes;
        stats.bytes_read += nbytes;
        stats.low_bytes_read += r.of->version == LOW ? nbytes : 0;
    }
    if (flags.load(std::memory_order_relaxed) & MOEOFF_FLAG_LOG_READS) {
        log_read(r, t_start, t_done, err);
    }
    table.end_read(r, err, message);
}

void io_threads::log_read(const read_request & r, int64_t t_start, int64_t t_done, int err) {
    const size_t m = (size_t) r.matrix;
    if (read_log.size() == n_read_log) {
        read_log.pop_front();
    }
    try {
        read_log.push_back({ ++n_logged, r.of->t_queued[m], t_start, t_done, table.source_of(*r.of, r.matrix).nbytes,
            table.tensor_of(r), r.of->expert, r.of->version, r.of->level[m], err });
    } catch (const std::bad_alloc &) {
        // the gap in seq tells
    }
}

int32_t io_threads::take_reads(moeoff_read * out, int32_t n) {
    const size_t n_out = std::min(read_log.size(), (size_t) std::max(n, 0));
    std::copy_n(read_log.begin(), n_out, out);
    read_log.erase(read_log.begin(), read_log.begin() + (ptrdiff_t) n_out);
    return (int32_t) n_out;
}

} // namespace moeoff
