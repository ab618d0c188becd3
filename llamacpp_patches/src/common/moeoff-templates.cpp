#include "moeoff-templates.h"

#include "moeoff-template-wire.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>

#ifdef __APPLE__
#    include <crt_externs.h>
#    define environ (*_NSGetEnviron())
#else
extern char ** environ;
#endif

namespace moeoff {

using steady = std::chrono::steady_clock;

enum class io { done, late, gone };

static const auto    PATIENCE = std::chrono::seconds(10);
static const int64_t SMALL    = 4 << 20;  // bytes for an ordinary conversation, which the budget knows of
// for a longer one, from the experts, and the bytes of the input as often as below
static const int64_t LARGE = 32 << 20;
static const int64_t TIMES = 64;       // bytes that tokenizers take for a character, too
static const size_t  SHORT = 1 << 16;  // characters of a text that need not be paid for
// of one that nobody can pay for; templates with instructions for tools write thousands
static const size_t LONGEST = 1 << 17;
static const auto   SOON    = std::chrono::milliseconds(100); // an ordinary conversation takes one

// A process of the program.
class helper {
  public:
    helper() = default;
    ~helper() { end(); }
    helper(const helper &)             = delete;
    helper & operator=(const helper &) = delete;

    bool runs() const { return pid > 0 && owner == getpid(); }
    void start(std::string path);
    void end();
    void interrupt(); // any thread: what is transferred is gone
    // writes or reads n bytes, and moves on by those that it has
    io transfer(char *& data, size_t & n, bool reads, steady::time_point until);

  private:
    std::mutex guard; // of the channel, while it is opened, closed or interrupted
    pid_t      pid     = -1;
    pid_t      owner   = -1; // of a copy of this process it is no child
    int        channel = -1;
};

class turn;

// Who waits for a helper, or has one.
struct place {
    std::deque<const turn *> queue; // the first of them has it
    std::shared_ptr<helper>  has = std::make_shared<helper>();
};

static std::mutex              mutex; // of what follows
static std::condition_variable moved_on;
static std::string             program_path;
static template_charge         charge = nullptr;
static bool                    ending = false;
static place                   quick; // where every question is asked
// where those go on that are not answered soon: one after the other, and nobody else waits for them
static place slow;

static thread_local bool too_late = false; // one request asks dozens of times

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
    ending = false;
}

void end_idle_templates() {
    std::lock_guard<std::mutex> lock(mutex);
    if (quick.queue.empty()) {
        quick.has->end();
    }
}

void end_templates() {
    std::lock_guard<std::mutex> lock(mutex);
    if (charge != nullptr) {
        ending = true;
        quick.has->interrupt();
        slow.has->interrupt();
        moved_on.notify_all();
    }
}

void helper::interrupt() {
    std::lock_guard<std::mutex> lock(guard);
    if (channel >= 0) {
        shutdown(channel, SHUT_RDWR);
    }
}

void helper::end() {
    {
        std::lock_guard<std::mutex> lock(guard);
        if (channel >= 0) {
            close(channel);
            channel = -1;
        }
    }
    if (pid > 0 && owner == getpid()) {
        kill(pid, SIGKILL);
        while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
        }
    }
    pid = -1;
}

void helper::start(std::string path) {
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
    char *    argv[] = { &path[0], nullptr };
    const int error  = posix_spawn(&pid, argv[0], &actions, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    {
        std::lock_guard<std::mutex> lock(guard);
        channel = ends[0];
    }
    owner = getpid();
    if (error != 0) {
        pid = -1;
        end();
        throw template_bound_error(path + ": the program for chat templates does not start: " + strerror(error));
    }
}

// The other side reads a question whole before it writes.
io helper::transfer(char *& data, size_t & n, bool reads, steady::time_point until) {
    while (n > 0) {
        const auto left  = std::chrono::duration_cast<std::chrono::milliseconds>(until - steady::now()).count();
        pollfd     ready = { channel, (short) (reads ? POLLIN : POLLOUT), 0 };
        const int  found = left > 0 ? poll(&ready, 1, (int) left) : 0;
        if (found == 0) {
            return io::late;
        }
        const ssize_t moved = found < 0 ? -1
                              : reads   ? recv(channel, data, n, MSG_DONTWAIT)
                                        : send(channel, data, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved == 0 || (moved < 0 && errno != EINTR && errno != EAGAIN)) {
            return io::gone;
        }
        data += moved > 0 ? moved : 0;
        n -= moved > 0 ? moved : 0;
    }
    return io::done;
}

struct reply {
    bool            fresh; // the helper had answered nothing before
    io              went;
    template_answer answer;
    jinja::caps     caps;
    std::string     text;
};

// A helper for one question, as soon as there is one.
class turn {
  public:
    turn() {
        std::unique_lock<std::mutex> lock(mutex);
        path  = program_path;
        taker = charge;
        enter(quick, lock);
    }

    ~turn() {
        // what it may still say is no answer to the next question; one idle program is enough
        if (mine && (!answered || at == &slow)) {
            mine->end();
        }
        std::lock_guard<std::mutex> lock(mutex);
        leave();
    }

    reply ask(const template_question & question, const std::string & source, const std::string & input);
    void  end() { mine->end(); }

  private:
    place *                 at = nullptr;
    std::shared_ptr<helper> mine;
    std::string             path;
    template_charge         taker;
    steady::time_point      since;
    bool                    answered = false;

    void enter(place & there, std::unique_lock<std::mutex> & lock);
    void leave();
    bool go_on();
    void begin();
    io   transfer(const void * data, size_t n, bool reads);
    void pay(int64_t nbytes, size_t n_text) const;
};

static void check_ending() { // under the mutex
    if (ending) {
        throw std::runtime_error("the server is shutting down");
    }
}

void turn::enter(place & there, std::unique_lock<std::mutex> & lock) {
    at = &there;
    at->queue.push_back(this);
    moved_on.wait(lock, [&] { return ending || at->queue.front() == this; });
    if (ending) {
        leave();
        check_ending();
    }
    mine = at->has;
}

void turn::leave() {
    if (at != nullptr) {
        at->queue.erase(std::find(at->queue.begin(), at->queue.end(), this));
        at = nullptr;
        moved_on.notify_all();
    }
}

// It takes longer: with its helper it goes to the slow place, if nobody is there, and others get a new one.
bool turn::go_on() {
    std::lock_guard<std::mutex> lock(mutex);
    if (at == &slow || !slow.queue.empty()) {
        return false;
    }
    quick.has = std::make_shared<helper>();
    slow.has  = mine;
    leave();
    at = &slow;
    at->queue.push_back(this);
    return true;
}

// So that the next byte that it says answers the next question.
void turn::begin() {
    answered         = false;
    const bool fresh = !mine->runs();
    if (fresh) {
        mine->end();
        mine->start(path);
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        check_ending(); // now, as from here on it is interrupted
    }
    if (fresh) { // a busy machine may take longer to start it than a conversation takes
        char   ready = 0, *at_byte = &ready;
        size_t n = 1;
        mine->transfer(at_byte, n, true, steady::now() + PATIENCE);
    }
    since = steady::now();
}

io turn::transfer(const void * data, size_t n, bool reads) {
    char * at_byte = (char *) data;
    io     went    = mine->transfer(at_byte, n, reads, at == &slow ? since + PATIENCE : since + SOON);
    if (went == io::late && at != &slow && go_on()) {
        went = mine->transfer(at_byte, n, reads, since + PATIENCE);
    }
    return went;
}

void turn::pay(int64_t nbytes, size_t n_text) const {
    nbytes += n_text > SHORT ? TIMES * (int64_t) n_text : 0;
    if ((taker == nullptr || !taker(nbytes)) && n_text > LONGEST) {
        throw template_bound_error("it makes " + std::to_string(n_text) + " characters of a few words");
    }
}

reply turn::ask(const template_question & question, const std::string & source, const std::string & input) {
    const int64_t taken = (int64_t) question.memory > SMALL ? (int64_t) question.memory : 0;
    pay(taken, 0);
    reply got = {};
    got.fresh = !mine->runs();
    begin();
    const auto then = [&](const void * data, size_t n, bool reads) {
        got.went = got.went == io::done ? transfer(data, n, reads) : got.went;
    };
    then(&question, sizeof(question), false);
    then(source.data(), source.size(), false);
    then(input.data(), input.size(), false);
    then(&got.answer, sizeof(got.answer), true);
    if (got.went == io::done && got.answer.n_caps != 0 && got.answer.n_caps != sizeof(got.caps)) {
        got.went = io::gone;
    }
    if (got.went == io::done) {
        pay(taken, got.answer.n_text);
        got.text.resize(got.answer.n_text);
    }
    then(&got.caps, got.answer.n_caps, true);
    then(&got.text[0], got.text.size(), true);
    answered = got.went == io::done && got.answer.status != TEMPLATE_NO_MEMORY; // after that it ends
    if (got.went == io::late && at == &quick) { // it begins anew when it is its turn among the slow ones
        mine->end();
        mine.reset();
        std::unique_lock<std::mutex> lock(mutex);
        leave();
        enter(slow, lock);
        lock.unlock();
        return ask(question, source, input);
    }
    if (got.went == io::gone) {
        std::lock_guard<std::mutex> lock(mutex);
        check_ending();
    }
    return got;
}

static reply ask(template_task task, const std::string & source, const std::string & input, bool mark_input) {
    if (too_late) {
        throw template_bound_error("it takes too long");
    }
    const int64_t large = LARGE + TIMES * (int64_t) input.size();
    turn          mine;
    for (const int64_t memory : { SMALL, large }) {
        const uint64_t          seconds  = (uint64_t) PATIENCE.count() + 1;
        const template_question question = { task, mark_input, (uint64_t) memory, seconds, source.size(),
            input.size() };
        reply                   got      = mine.ask(question, source, input);
        if (got.went == io::gone && !got.fresh) { // somebody may have ended it
            mine.end();
            got = mine.ask(question, source, input);
        }
        if (got.went == io::late) {
            too_late = true;
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
        mine.end();
    }
    throw template_bound_error("it takes too much memory");
}

void begin_template_request() { too_late = false; }

template_summary summarize_template(const std::string & source) {
    reply got = ask(TEMPLATE_SUMMARIZE, source, "", false);
    return { std::move(got.text), got.caps };
}

std::string render_template(const std::string & source, const common_json & input, bool mark_input) {
    return ask(TEMPLATE_RENDER, source, input.dump_safe(), mark_input).text;
}

} // namespace moeoff
