#pragma once

// What went wrong in the last call of moeoff.h on this thread, and the frame around every one that may throw.

#include <exception>
#include <new>
#include <string>
#include <system_error>

namespace moeoff {

std::string & last_error(); // of the calling thread

// -1, for the caller to return
inline int set_last_error(const std::string & message) {
    last_error() = message;
    return -1;
}

// what f returns; if it throws, on_error, and moeoff_last_error() says why
template <typename F, typename R>
R guarded(R on_error, F f) noexcept {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        last_error() = "out of memory"; // short enough to be stored in the string itself
    } catch (const std::exception & e) {
        try {
            last_error() = dynamic_cast<const std::system_error *>(&e) ? std::string("cannot start a thread: ") + e.what() : e.what();
        } catch (...) {
            last_error() = "out of memory";
        }
    }
    return on_error;
}

} // namespace moeoff
