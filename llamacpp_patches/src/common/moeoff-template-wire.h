// The protocol between a process and its template program, over a socket: a question, and then its answer.

#pragma once

#include <sys/socket.h>

#include <cstdint>

#ifndef MSG_NOSIGNAL // macOS, where sockets are told
#    define MSG_NOSIGNAL 0
#endif

namespace moeoff {

inline void no_signals(int fd) {
#ifdef SO_NOSIGPIPE
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &yes, sizeof(yes));
#else
    (void) fd;
#endif
}

enum template_task : uint32_t { TEMPLATE_SUMMARIZE, TEMPLATE_RENDER };

struct template_question { // source and input follow
    uint32_t task;
    uint32_t mark_input;
    uint64_t memory; // bytes that may be taken for it
    uint64_t seconds; // after which the program ends itself: who asked may be gone
    uint64_t n_source;
    uint64_t n_input;
};

enum template_status : uint32_t { TEMPLATE_DONE, TEMPLATE_FAILED, TEMPLATE_NO_MEMORY };

struct template_answer { // a text follows; of a summary, after the capabilities
    uint32_t status;
    uint32_t n_caps;
    uint64_t n_text;
};

} // namespace moeoff
