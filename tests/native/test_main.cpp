// Runs the unit test that is named, each in a process of its own: a failed check aborts, a hang ends with the alarm.
//
// usage: unit_tests NAME

#include "check.h"

#include <cstring>

#include <unistd.h>

std::vector<unit_test> & unit_tests() {
    static std::vector<unit_test> list;
    return list;
}

int main(int argc, char ** argv) {
    alarm(600);
    for (const auto & test : unit_tests()) {
        if (argc == 2 && strcmp(argv[1], test.name) == 0) {
            test.run();
            return 0;
        }
    }
    fprintf(stderr, "usage: unit_tests NAME, one of\n");
    for (const auto & test : unit_tests()) {
        fprintf(stderr, "  %s\n", test.name);
    }
    return 2;
}
