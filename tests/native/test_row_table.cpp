// Rows of a table on disk: which are read from the file, which come from the cache, and what a damaged file gives.

#include "check.h"
#include "slice_file.h"

#include "moeoff-row-table.h"

#include <cerrno>
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

// a table of its own in a file of its own
struct table_file {
    explicit table_file(int64_t n_rows, bool direct = true)
        : file(first + (size_t) n_rows * row_bytes), rows(table_info(n_rows)) {
        REQUIRE(in.add(file.path, direct, error) == 0
                && rows.set_source({ 0, 0, first, row_bytes * (uint64_t) n_rows, 0 }, in, error));
    }
    // all of them, and each once, with the bytes of the file
    bool read(const std::vector<int32_t> & ids, size_t n_reads = 1, std::string * message = nullptr) {
        uint8_t          row[row_bytes];
        std::string      failure;
        std::vector<int> n_uses(ids.size());
        const bool       is_read = rows.read(
            ids.data(), ids.size(), row, n_reads,
            [&](size_t i) {
                n_uses[i]++;
                for (uint64_t k = 0; k < row_bytes; k++) {
                    REQUIRE(row[k] == byte_at(first + (uint64_t) ids[i] * row_bytes + k));
                }
            },
            message ? *message : failure);
        for (const int n : n_uses) {
            REQUIRE(is_read ? n == 1 : n <= 1);
        }
        return is_read;
    }
    moeoff_stats stats() const {
        moeoff_stats out = {};
        rows.add_stats(out);
        return out;
    }

    slice_file  file;
    files       in;
    std::string error;
    row_table   rows;
};

TEST(a_row_is_read_once_while_it_is_in_the_cache) {
    table_file table(50);
    for (uint64_t round = 0; round < 3; round++) {
        for (int32_t row = 0; row < 50; row += 7) {
            REQUIRE(table.read({ row }));
        }
        REQUIRE(table.stats().row_misses == 8 && table.stats().row_hits == 8 * round);
    }
    table.rows.reset_stats();
    REQUIRE(table.stats().row_misses == 0 && table.stats().row_hits == 0 && table.stats().row_bytes_read == 0);
}

TEST(rows_that_share_a_place_take_turns) {
    const int32_t n_places = MOEOFF_ROW_CACHE_BYTES / (row_bytes + sizeof(int32_t));
    table_file    table(2 * n_places);
    for (const int32_t row : { 3, n_places + 3, 3, 4 }) {
        REQUIRE(table.read({ row }));
    }
    REQUIRE(table.stats().row_misses == 4);
    REQUIRE(table.read({ 3, 4 }) && table.stats().row_misses == 4);
}

TEST(a_row_larger_than_the_cache_is_read_all_the_same) {
    constexpr uint64_t nbytes = MOEOFF_ROW_CACHE_BYTES + 1;
    row_table          rows(table_info(2, nbytes));
    slice_file         file(2 * nbytes);
    files              in;
    std::string        error;
    REQUIRE(in.add(file.path, true, error) == 0 && rows.set_source({ 0, 0, 0, 2 * nbytes, 0 }, in, error));
    std::vector<uint8_t> row(nbytes);
    const int32_t        last = 1;
    REQUIRE(rows.read(
                &last, 1, row.data(), 1, [](size_t) {}, error)
            && row[0] == byte_at(nbytes) && row[nbytes - 1] == byte_at(2 * nbytes - 1));
}

TEST(rows_that_share_pages_are_read_together) {
    for (const bool direct : { true, false }) {
        table_file table(50, direct);
        REQUIRE(table.read({ 0, 1, 2, 30, 31 }, 4));
        REQUIRE(table.stats().row_misses == 5 && table.stats().row_bytes_read == 2 * page_size);
        REQUIRE(table.read({ 3, 4 }, 4) && table.stats().row_bytes_read == 4 * page_size); // row 3 lies across two
    }
}

TEST(many_rows_are_read_at_a_time) {
    for (const bool direct : { true, false }) {
        for (const size_t n_reads : { 1, 3, 64 }) {
            table_file           table(3000, direct);
            std::vector<int32_t> ids;
            for (int32_t row = 0; row < 3000; row += 1 + (row % 11)) {
                ids.push_back(row);
            }
            REQUIRE(table.read(ids, n_reads) && table.stats().row_misses == ids.size());
            REQUIRE(table.read(ids, n_reads) && table.stats().row_hits > ids.size() / 2);
        }
    }
}

TEST(reads_that_the_system_does_in_one_call) {
    slice_file               file(3 * page_size + 10);
    files                    in;
    std::string              error;
    const async_reads::lease reads = async_reads::borrow(4 * page_size);
    const auto               never = [] { return false; };
    REQUIRE(in.add(file.path, false, error) == 0);
    for (size_t i = 0; i < 4; i++) {
        if (!reads->begin(i, in.descriptor(0), reads->pages() + i * page_size, page_size, i * page_size)) {
            return; // there are systems without
        }
    }
    REQUIRE(reads->begin(5, 1 << 20, reads->pages(), page_size, 0)); // of no file
    reads->submit();
    for (const size_t i : { 2, 0, 1 }) {
        REQUIRE(reads->end(i, never) == (ssize_t) page_size
                && reads->pages()[i * page_size + 7] == byte_at(i * page_size + 7));
    }
    REQUIRE(reads->end(5, never) == -EBADF && reads->end(3, never) == 10);
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
    REQUIRE(!rows.set_source({ 0, 0, first + 1, 10 * row_bytes, 0 }, in, error)
            && error.find("beyond the end") != std::string::npos);
    REQUIRE(!rows.has_source());
}

TEST(a_row_that_the_file_lost_says_where_it_was) {
    for (const bool direct : { true, false }) {
        table_file  table(200, direct);
        std::string message;
        REQUIRE(truncate(table.file.path.c_str(), (off_t) (first + 50 * row_bytes + 10)) == 0);
        REQUIRE(!table.read({ 0, 10, 20, 50, 60, 150 }, 8, &message));
        REQUIRE(
            message.find(table.file.path + ": read of 1000 bytes at offset 50100 failed: the file ends at 50110") == 0);
        REQUIRE(table.read({ 40, 49 }));
    }
}

TEST(several_threads_read_rows) {
    const int32_t            n_rows = 5000; // more than there are places
    table_file               table(n_rows);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; seed++) {
        threads.emplace_back([&table, seed] {
            std::mt19937 rng(seed);
            for (int i = 0; i < 1000; i++) {
                const int32_t row = (int32_t) (rng() % (n_rows - 9));
                REQUIRE(table.read({ row, row + 1, row + 9 }, 2));
            }
        });
    }
    for (auto & t : threads) {
        t.join();
    }
}
