#include "moeoff-uploader.h"

namespace moeoff {

void uploader::start(std::function<void(gate & g, const upload & u)> w) {
    write = std::move(w);
    {
        checked_lock lock(mutex);
        stopped = false;
    }
    thread = std::thread([this] { run(); });
}

void uploader::add(gate & g, const upload & u) {
    {
        checked_lock lock(mutex);
        if (!stopped) {
            jobs.push_back({ &g, u });
            changed.notify_all();
            return;
        }
    }
    write(g, u);
    checked_lock lock(mutex);
    finish_one();
}

// under the mutex, or a drain() could look before and sleep after
void uploader::finish_one() {
    pending.fetch_sub(1, std::memory_order_acq_rel);
    changed.notify_all();
}

void uploader::drain() {
    checked_lock lock(mutex);
    while (n_pending() > 0) {
        lock.wait(changed);
    }
}

void uploader::stop() {
    {
        checked_lock lock(mutex);
        stopped = true;
        changed.notify_all();
    }
    if (thread.joinable()) {
        thread.join();
    }
}

void uploader::run() {
    checked_lock lock(mutex);
    while (!jobs.empty() || !stopped) {
        if (jobs.empty()) {
            lock.wait(changed);
            continue;
        }
        const job next = jobs.front();
        jobs.pop_front();
        lock.unlock();
        write(*next.g, next.u);
        lock.lock();
        finish_one();
    }
}

} // namespace moeoff
