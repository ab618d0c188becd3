#pragma once

// The error message of the calling thread (moeoff_last_error()), the frame around every function of moeoff.h that may
// throw, and the text of the handshake with Python.

#include <cstddef>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace moeoff {

std::string & last_error(); // of the calling thread

// -1, for the caller to return
inline int set_last_error(const std::string & message) {
    last_error() = message;
    return -1;
}

// what f returns; if it throws, on_error, and moeoff_last_error() says why
template <typename F, typename R> R guarded(R on_error, F f) noexcept {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        last_error() = "out of memory"; // short enough to be stored in the string itself
    } catch (const std::exception & e) {
        try {
            last_error() = dynamic_cast<const std::system_error *>(&e)
                               ? std::string("cannot start a thread: ") + e.what()
                               : e.what();
        } catch (...) {
            last_error() = "out of memory";
        }
    }
    return on_error;
}

// appends "struct:size,field:offset,..." to all
inline void add_layout(
    std::string & all, const char * type, size_t size, std::initializer_list<std::pair<const char *, size_t>> fields) {
    all += (all.empty() ? "" : ";") + std::string(type) + ":" + std::to_string(size);
    for (const auto & [name, offset] : fields) {
        all += "," + std::string(name) + ":" + std::to_string(offset);
    }
}

} // namespace moeoff

// what moeoff-abi.inc and moeoff-server-abi.inc consist of: append to a string `all`
#define STRUCT(type, ...)                                                                                              \
    {                                                                                                                  \
        using of = type;                                                                                               \
        moeoff::add_layout(all, #type, sizeof(of), __VA_ARGS__);                                                       \
    }
#define FIELD(name) { #name, offsetof(of, name) }
