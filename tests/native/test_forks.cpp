// Copies of a process (fork) and what outlives a buffer: nobody waits for threads that are not there, and nothing is
// touched that is gone.

#include "check.h"
#include "slice_file.h"

#include "moeoff-store.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace moeoff;

static constexpr int      n_expert = 4;
static constexpr uint64_t nbytes   = 5000;

// One matrix of one layer, and room for half of its experts.
struct small_buffer {
    slice_file             file { 1 << 16 };
    moeoff_expert_buffer * eb = moeoff_expert_buffer_init({ MOEOFF_FLAG_KEEP | MOEOFF_FLAG_EAGER, 2, 0, page_size });
    store &                s  = *eb->store;
    const tensor *         t  = s.add_tensor(tensor_info(0, MOEOFF_MATRIX_UP, n_expert), false);

    small_buffer() {
        std::string                error;
        std::vector<moeoff_source> sources;
        for (int e = 0; e < n_expert; e++) {
            sources.push_back({ 0, 1, (uint64_t) e * nbytes, nbytes, 0 });
        }
        REQUIRE(s.add_file(file.path, error) == 0 && s.set_sources(0, HIGH, sources.data(), n_expert, error));
        REQUIRE(s.set_limits(2 * arena::slot_bytes(nbytes), 0, error) && s.start(error));
    }

    void compute(int32_t expert) {
        const uint8_t v = HIGH;
        s.pin(*t, &expert, &v, 1);
        for (uint64_t seen = s.generation(); !s.at(*t, expert, v).settled(); seen = s.generation()) {
            s.wait(seen, *t, 1);
        }
        REQUIRE(s.at(*t, expert, v).data());
        s.unpin(*t, expert, v);
    }
};

// whether a copy of this process that does this ends by itself, and well
static bool ends_in_a_copy(const std::function<bool()> & what) {
    const pid_t child = fork();
    if (child == 0) {
        _exit(what() ? 0 : 1);
    }
    int status = -1;
    for (int i = 0; i < 120000; i++) { // two minutes: a busy machine is slow
        if (waitpid(child, &status, WNOHANG) == child) {
            return status == 0;
        }
        usleep(1000);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return false;
}

TEST(a_copy_of_the_process_frees_a_buffer_whatever_its_threads_did) {
    small_buffer      x;
    std::atomic<bool> ends { false };
    std::thread       busy([&] {
        for (int e = 0; !ends; e = (e + 1) % n_expert) {
            x.compute(e);
        }
    });
    for (int i = 0; i < 40; i++) {
        REQUIRE(ends_in_a_copy([&] {
            moeoff_expert_buffer_free(x.eb);
            return true;
        }));
    }
    ends = true;
    busy.join();
    x.compute(0); // here nothing has changed
    moeoff_expert_buffer_free(x.eb);
}

TEST(a_graph_in_a_copy_of_the_process_ends_and_says_why) {
    small_buffer x;
    x.compute(0);
    REQUIRE(x.s.started() && !x.s.is_copy() && !moeoff_should_abort(x.eb));
    REQUIRE(ends_in_a_copy([&] {
        char message[256] = "";
        return x.s.is_copy() && !x.s.started() && moeoff_should_abort(x.eb)
               && moeoff_take_error(x.eb, message, sizeof(message)) == 1 && strstr(message, "another process");
    }));
    REQUIRE(x.s.started() && !moeoff_should_abort(x.eb));
    moeoff_expert_buffer_free(x.eb);
}

TEST(a_graph_that_outlives_its_buffer_ends) {
    small_buffer           x;
    std::shared_ptr<store> model(x.eb->self, x.eb->store.get()); // as a model's ggml buffer has it
    x.compute(0);
    moeoff_expert_buffer_free(x.eb);
    REQUIRE(moeoff_should_abort(x.eb));
    std::string message;
    REQUIRE(!model->take_error(message)); // nothing has failed but this
}
