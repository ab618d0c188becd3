#include "moeoff-templates.h"

#include "moeoff-template-wire.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

extern char ** environ;

namespace moeoff {

using steady = std::chrono::steady_clock;

static const auto    PATIENCE = std::chrono::seconds(10);
static const auto    BARRED   = std::chrono::minutes(1); // after that: one request asks dozens of times
static const int64_t SMALL    = 4 << 20;                 // bytes for an ordinary conversation, which the budget knows of
static const int64_t LARGE    = 32 << 20;                // for a longer one, from the experts, and the bytes of the input as often as below
static const int64_t TIMES    = 64;                      // bytes that tokenizers take for a character, too
static const size_t  LONGEST  = 1 << 17; // characters of a text that nobody pays for; templates with instructions for tools write thousands

static std::mutex         mutex; // one question at a time
static std::string        program_path;
static template_charge    charge  = nullptr;
static pid_t              child   = -1;
static int                channel = -1;
static std::string        barred; // a source
static steady::time_point barred_until;

static void end_child() {
    if (channel >= 0) {
        close(channel);
        channel = -1;
    }
    if (child > 0) {
        kill(child, SIGKILL);
        while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
        }
        child = -1;
    }
}

void isolate_templates(const std::string & program) {
    std::lock_guard<std::mutex> lock(mutex);
    program_path = program;
}

bool templates_isolated() {
    std::lock_guard<std::mutex> lock(mutex);
    return !program_path.empty();
}

void charge_templates(template_charge taker) {
    std::lock_guard<std::mutex> lock(mutex);
    charge = taker;
}

static void start_child() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
        throw template_bound_error(std::string("the program for chat templates has no connection: ") + strerror(errno));
    }
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    no_signals(ends[0]);
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t          attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP); // Ctrl-C is for the other one
    char *    argv[] = { &program_path[0], nullptr };
    const int error  = posix_spawn(&child, argv[0], &actions, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    channel = ends[0];
    if (error != 0) {
        child = -1;
        end_child();
        throw template_bound_error(program_path + ": the program for chat templates does not start: " + strerror(error));
    }
}

enum class io { done, late, gone };

// Writes or reads n bytes. The other side reads a question whole before it writes.
static io transfer(void * data, size_t n, bool reads, steady::time_point end) {
    while (n > 0) {
        const auto left  = std::chrono::duration_cast<std::chrono::milliseconds>(end - steady::now()).count();
        pollfd     ready = { channel, (short) (reads ? POLLIN : POLLOUT), 0 };
        const int  found = left > 0 ? poll(&ready, 1, (int) left) : 0;
        if (found == 0) {
            return io::late;
        }
        const ssize_t moved = found < 0 ? -1 : reads ? recv(channel, data, n, MSG_DONTWAIT) : send(channel, data, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved == 0 || (moved < 0 && errno != EINTR && errno != EAGAIN)) {
            return io::gone;
        }
        data = (char *) data + (moved > 0 ? moved : 0);
        n -= moved > 0 ? moved : 0;
    }
    return io::done;
}

struct reply {
    io              went;
    template_answer answer;
    jinja::caps     caps;
    std::string     text;
};

static void pay(int64_t taken, size_t n_text) {
    const int64_t nbytes = taken + TIMES * (int64_t) n_text;
    if ((charge == nullptr || !charge(nbytes)) && n_text > LONGEST) {
        throw template_bound_error("it makes " + std::to_string(n_text) + " characters of a few words");
    }
}

static reply ask_once(const template_question & question, const std::string & source, const std::string & input, int64_t taken) {
    if (child < 0) {
        start_child();
    }
    const auto end = steady::now() + PATIENCE;
    reply      got = {};
    got.went       = transfer((void *) &question, sizeof(question), false, end);
    got.went       = got.went == io::done ? transfer((void *) source.data(), source.size(), false, end) : got.went;
    got.went       = got.went == io::done ? transfer((void *) input.data(), input.size(), false, end) : got.went;
    got.went       = got.went == io::done ? transfer(&got.answer, sizeof(got.answer), true, end) : got.went;
    if (got.went == io::done && got.answer.n_caps != 0 && got.answer.n_caps != sizeof(got.caps)) {
        got.went = io::gone;
    }
    if (got.went == io::done) {
        pay(taken, got.answer.n_text);
        got.went = transfer(&got.caps, got.answer.n_caps, true, end);
    }
    if (got.went == io::done) {
        got.text.resize(got.answer.n_text);
        got.went = transfer(&got.text[0], got.text.size(), true, end);
    }
    return got;
}

static reply ask(template_task task, const std::string & source, const std::string & input, bool mark_input) {
    std::lock_guard<std::mutex> lock(mutex);
    if (source == barred && steady::now() < barred_until) {
        throw template_bound_error("it has taken too long a moment ago");
    }
    const int64_t large = LARGE + TIMES * (int64_t) input.size();
    try {
        for (const int64_t memory : { SMALL, large }) {
            const int64_t taken = memory == large ? large : 0;
            pay(taken, 0);
            reply got = ask_once({ task, mark_input, (uint64_t) memory, source.size(), input.size() }, source, input, taken);
            if (got.went == io::late) {
                barred       = source;
                barred_until = steady::now() + BARRED;
                throw template_bound_error("it takes longer than " + std::to_string(PATIENCE.count()) + " s");
            }
            if (got.went == io::gone && memory == large) { // with less memory that may be why
                throw template_bound_error("it ends the program that runs it");
            }
            if (got.went == io::done && got.answer.status == TEMPLATE_FAILED) {
                throw std::runtime_error(got.text);
            }
            if (got.went == io::done && got.answer.status == TEMPLATE_DONE) {
                return got;
            }
            end_child();
        }
        throw template_bound_error("it takes too much memory");
    } catch (const std::invalid_argument &) { // what it may still say is no answer to the next question
        end_child();
        throw;
    }
}

template_summary summarize_template(const std::string & source) {
    reply got = ask(TEMPLATE_SUMMARIZE, source, "", false);
    return { std::move(got.text), got.caps };
}

std::string render_template(const std::string & source, const common_json & input, bool mark_input) {
    return ask(TEMPLATE_RENDER, source, input.dump_safe(), mark_input).text;
}

} // namespace moeoff
