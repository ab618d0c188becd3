// Rows of a table on disk: which are read from the file, which come from the cache, and what a damaged file gives.

#include "check.h"
#include "slice_file.h"

#include "moeoff-row-table.h"

#include <cstring>
#include <random>
#include <thread>

using namespace moeoff;

static constexpr uint64_t row_bytes = 1000, first = 100;

static moeoff_tensor_info table_info(int64_t n_rows, uint64_t nbytes = row_bytes) {
    moeoff_tensor_info info = {};
    snprintf(info.name, sizeof(info.name), "token_embd.weight");
    info.ne[0]  = (int64_t) nbytes;
    info.ne[1]  = n_rows;
    info.nbytes = nbytes;
    return info;
}

static bool is_row(int32_t row, const uint8_t * bytes) {
    for (uint64_t i = 0; i < row_bytes; i++) {
        if (bytes[i] != byte_at(first + (uint64_t) row * row_bytes + i)) {
            return false;
        }
    }
    return true;
}

static moeoff_source whole(int64_t n_rows) { return { 0, 0, first, row_bytes * (uint64_t) n_rows, 0 }; }

TEST(a_row_is_read_once_while_it_is_in_the_cache) {
    slice_file  file(first + 50 * row_bytes);
    files       in;
    std::string error;
    row_table   rows(table_info(50));
    REQUIRE(in.add(file.path, false, error) == 0 && rows.set_source(whole(50), in, error));
    uint8_t out[row_bytes];
    for (int round = 0; round < 3; round++) {
        for (int32_t row = 0; row < 50; row += 7) {
            rows.expect(&row, 1);
            REQUIRE(rows.read(row, out, error) && is_row(row, out));
        }
        REQUIRE(rows.n_reads() == 8);
    }
}

TEST(rows_that_share_a_place_take_turns) {
    const int32_t n_places = row_table::cache_bytes / row_bytes, n_rows = 2 * n_places;
    slice_file  file(first + n_rows * row_bytes);
    files       in;
    std::string error;
    row_table   rows(table_info(n_rows));
    REQUIRE(in.add(file.path, false, error) == 0 && rows.set_source(whole(n_rows), in, error));
    uint8_t out[row_bytes];
    for (const int32_t row : { 3, n_places + 3, 3, 4 }) {
        REQUIRE(rows.read(row, out, error) && is_row(row, out));
    }
    REQUIRE(rows.n_reads() == 4);
    REQUIRE(rows.read(4, out, error) && rows.read(3, out, error) && rows.n_reads() == 4);
}

TEST(a_row_larger_than_the_cache_is_read_all_the_same) {
    row_table rows(table_info(2, row_table::cache_bytes + 1));
    slice_file  file(2 * (row_table::cache_bytes + 1));
    files       in;
    std::string error;
    REQUIRE(in.add(file.path, false, error) == 0 && rows.set_source({ 0, 0, 0, 2 * (row_table::cache_bytes + 1), 0 }, in, error));
    std::vector<uint8_t> out(row_table::cache_bytes + 1);
    REQUIRE(rows.read(1, out.data(), error) && out[0] == byte_at(row_table::cache_bytes + 1));
}

TEST(a_source_is_the_whole_tensor_inside_its_file) {
    slice_file  file(first + 10 * row_bytes);
    files       in;
    std::string error;
    row_table   rows(table_info(10));
    REQUIRE(in.add(file.path, false, error) == 0);
    REQUIRE(!rows.set_source({ 1, 0, first, 10 * row_bytes, 0 }, in, error));
    REQUIRE(!rows.set_source({ 0, 1, first, 10 * row_bytes, 0 }, in, error));
    REQUIRE(!rows.set_source({ 0, 0, first, 9 * row_bytes, 0 }, in, error));
    REQUIRE(!rows.set_source({ 0, 0, first + 1, 10 * row_bytes, 0 }, in, error) && error.find("beyond the end") != std::string::npos);
    REQUIRE(!rows.has_source());
}

TEST(a_row_that_the_file_lost_says_where_it_was) {
    slice_file  file(first + 10 * row_bytes);
    files       in;
    std::string error;
    row_table   rows(table_info(10));
    REQUIRE(in.add(file.path, false, error) == 0 && rows.set_source(whole(10), in, error));
    REQUIRE(truncate(file.path.c_str(), (off_t) (first + 5 * row_bytes + 10)) == 0);
    uint8_t out[row_bytes];
    REQUIRE(!rows.read(5, out, error));
    REQUIRE(error.find(file.path + ": read of 1000 bytes at offset 5100 failed: the file ends at 5110") == 0);
    REQUIRE(rows.read(4, out, error) && is_row(4, out));
}

TEST(several_threads_read_rows) {
    const int32_t n_rows = 5000; // more than there are places
    slice_file  file(first + n_rows * row_bytes);
    files       in;
    std::string error;
    row_table   rows(table_info(n_rows));
    REQUIRE(in.add(file.path, false, error) == 0 && rows.set_source(whole(n_rows), in, error));
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; seed++) {
        threads.emplace_back([&rows, seed] {
            std::mt19937 rng(seed);
            std::string  message;
            uint8_t      out[row_bytes];
            for (int i = 0; i < 3000; i++) {
                const int32_t row = (int32_t) (rng() % n_rows);
                REQUIRE(rows.read(row, out, message) && is_row(row, out));
            }
        });
    }
    for (auto & t : threads) {
        t.join();
    }
}
