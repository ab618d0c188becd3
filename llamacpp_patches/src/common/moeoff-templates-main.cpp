// The program that runs chat templates: it answers questions on descriptor 0, one after the other, until the other side
// closes the socket.

#include "moeoff-template-wire.h"
#include "moeoff-templates.h"

#include "ggml.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <new>
#include <type_traits>

using namespace moeoff;

// all that json.cpp takes of ggml
void ggml_abort(const char *, int, const char *, ...) { abort(); }

static_assert(std::is_trivially_copyable<jinja::caps>::value, "capabilities are sent as they are");

struct parsed_template {
    std::string    given, source;
    jinja::program program;
    jinja::caps    caps;
};

static const size_t KEEP = 2; // a model has one template, or one more for tools

static const parsed_template & parse(std::list<parsed_template> & kept, const std::string & given) {
    for (const auto & one : kept) {
        if (one.given == given) {
            return one;
        }
    }
    parsed_template made = { given, given, {}, {} };
    made.program         = parse_template(made.source);
    made.caps            = jinja::caps_get(made.program);
    kept.push_front(std::move(made));
    if (kept.size() > KEEP) {
        kept.pop_back();
    }
    return kept.front();
}

static bool read_whole(void * data, size_t n) {
    while (n > 0) {
        const ssize_t got = recv(0, data, n, 0);
        if (got <= 0 && !(got < 0 && errno == EINTR)) {
            return false;
        }
        data = (char *) data + (got > 0 ? got : 0);
        n -= got > 0 ? got : 0;
    }
    return true;
}

static bool write_whole(const void * data, size_t n) {
    while (n > 0) {
        const ssize_t put = send(0, data, n, MSG_NOSIGNAL);
        if (put < 0 && errno != EINTR) {
            return false;
        }
        data = (const char *) data + (put > 0 ? put : 0);
        n -= put > 0 ? put : 0;
    }
    return true;
}

static uint64_t address_space() {
    unsigned long n_pages = 0;
    if (FILE * file = fopen("/proc/self/statm", "r")) {
        n_pages = fscanf(file, "%lu", &n_pages) == 1 ? n_pages : 0;
        fclose(file);
    }
    return n_pages * (uint64_t) sysconf(_SC_PAGESIZE);
}

static void bound_memory(uint64_t before, uint64_t nbytes) {
    if (before == 0) { // not Linux
        return;
    }
    rlimit bound;
    getrlimit(RLIMIT_AS, &bound); // the other program may have a bound of its own
    bound.rlim_cur = std::min<rlim_t>(before + nbytes, bound.rlim_max);
    setrlimit(RLIMIT_AS, &bound);
}

// The engine takes a failed allocation for an error of the template's, or for something that a template does not
// support.
static bool no_memory = false;

static void on_no_memory() {
    no_memory = true;
    throw std::bad_alloc();
}

static template_answer answer(
    std::list<parsed_template> & kept, const template_question & question, std::string & text, jinja::caps & caps) {
    template_answer said = { TEMPLATE_DONE, 0, 0 };
    try {
        std::string given(question.n_source, '\0');
        std::string input(question.n_input, '\0');
        if (!read_whole(&given[0], given.size()) || !read_whole(&input[0], input.size())) {
            exit(0);
        }
        const parsed_template & found = parse(kept, given);
        if (question.task == TEMPLATE_SUMMARIZE) {
            caps        = found.caps;
            text        = found.source;
            said.n_caps = sizeof(caps);
        } else {
            text = render_template(found.program, found.source, common_json::parse(input), question.mark_input != 0);
        }
    } catch (const std::exception & e) {
        said.status = TEMPLATE_FAILED;
        text        = e.what();
    }
    if (no_memory) {
        return { TEMPLATE_NO_MEMORY, 0, 0 };
    }
    said.n_text = text.size();
    return said;
}

// As of a new process: who started this one may have blocked it, or chosen to ignore it
static void receive_alarms() {
    sigset_t alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    signal(SIGALRM, SIG_DFL);
    sigprocmask(SIG_UNBLOCK, &alarms, nullptr);
}

int main() {
    for (int fd = 3; fd < 1024; fd++) { // of the process that has started this one
        close(fd);
    }
    const rlimit no_core = { 0, 0 };
    setrlimit(RLIMIT_CORE, &no_core);
    std::set_new_handler(on_no_memory);
    receive_alarms();
    no_signals(0);
    const uint64_t             before = address_space();
    std::list<parsed_template> kept;
    template_question          question;
    const char                 ready = 0;
    write_whole(&ready, sizeof(ready));
    while (read_whole(&question, sizeof(question))) {
        alarm((unsigned) question.seconds);
        bound_memory(before, question.memory + 2 * (question.n_source + question.n_input)); // so that it can be read
        std::string     text;
        jinja::caps     caps;
        template_answer said = answer(kept, question, text, caps);
        if (!write_whole(&said, sizeof(said)) || !write_whole(&caps, said.n_caps)
            || !write_whole(text.data(), said.n_text) || said.status == TEMPLATE_NO_MEMORY) {
            break;
        }
        alarm(0);
    }
    return 0;
}
