#pragma once

// Checks for the native tests, and the list of unit tests that test_main.cpp runs by name.

#include <cstdio>
#include <cstdlib>
#include <vector>

#define REQUIRE(x)                                                                \
    do {                                                                          \
        if (!(x)) {                                                               \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x); \
            abort();                                                              \
        }                                                                         \
    } while (0)

struct unit_test {
    const char * name;
    void (*run)();
};

std::vector<unit_test> & unit_tests();

struct unit_test_entry {
    unit_test_entry(const char * name, void (*run)()) { unit_tests().push_back({ name, run }); }
};

// tests/native/test_native.py finds the tests by this word at the beginning of a line
#define TEST(name)                                            \
    static void name();                                       \
    static const unit_test_entry entry_of_##name(#name, name); \
    static void name()
