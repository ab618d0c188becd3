// Reports each request to the host: its route, how it ended, and the tokens and times of its answers.
//
// One thread of the HTTP server reads a request, collects its results, writes the answer, and then takes the next one.

#include "moeoff-server-hooks.h"

#include "../server-task.h"

#include "ggml.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>

namespace moeoff {

namespace {

struct answer {
    bool         ended    = false; // and not only begun
    uint64_t     n_cached = 0, n_read = 0, n_written = 0;
    int64_t      t_first = 0, t_last = 0; // of its tokens, in us
    server_usage usage;
};

struct request_log {
    bool                     runs = false;
    std::string              method, path;
    int64_t                  t_start = 0;
    bool                     failed  = false;
    uint64_t                 n_read  = 0; // of embeddings and the like
    std::map<size_t, answer> answers; // by their index
};

} // namespace

static thread_local request_log log_of_request;

void server_request_begins(const std::string & method, const std::string & path) {
    if (server_has_host() && server_host()->answered != nullptr) {
        log_of_request         = request_log();
        log_of_request.runs    = true;
        log_of_request.method  = method;
        log_of_request.path    = path;
        log_of_request.t_start = ggml_time_us();
    }
}

void server_request_gets(const server_task_result & result) {
    request_log & log = log_of_request;
    if (!log.runs) {
        return;
    }
    if (const auto * whole = dynamic_cast<const server_task_result_cmpl_final *>(&result)) {
        const server_slot_stats & stats = whole->stats;
        log.answers[whole->index]       = { true, stats.n_prompt_cached, stats.n_prompt_processed, stats.n_gen,
            stats.t_prompt_last, stats.t_gen_last, stats.moeoff };
    } else if (const auto * part = dynamic_cast<const server_task_result_cmpl_partial *>(&result)) {
        answer & one = log.answers[part->index];
        // of the prompt
        const int32_t n_context = part->is_progress     ? part->progress.processed
                                  : part->n_decoded > 0 ? part->n_prompt_tokens
                                                        : 0;
        one.n_cached            = (uint64_t) std::max(part->n_prompt_tokens_cache, 0);
        one.n_read              = (uint64_t) std::max(n_context - part->n_prompt_tokens_cache, 0);
        if (part->n_decoded > 0 && !part->is_progress) {
            one.n_written = (uint64_t) part->n_decoded;
            one.t_last    = ggml_time_us();
            one.t_first   = one.t_first > 0 ? one.t_first : one.t_last;
        }
    } else if (const auto * embedding = dynamic_cast<const server_task_result_embd *>(&result)) {
        log.n_read += (uint64_t) std::max(embedding->n_tokens, 0);
    } else if (const auto * score = dynamic_cast<const server_task_result_rerank *>(&result)) {
        log.n_read += (uint64_t) std::max(score->n_tokens, 0);
    } else if (dynamic_cast<const server_task_result_error *>(&result) != nullptr) {
        log.failed = true;
    }
}

__attribute__((format(printf, 2, 3))) static void append(std::string & text, const char * format, ...) {
    char    part[160];
    va_list args;
    va_start(args, format);
    vsnprintf(part, sizeof(part), format, args);
    va_end(args);
    text += (text.empty() ? "" : ", ");
    text += part;
}

static std::string what_it_took(const request_log & log) {
    answer   all;
    uint64_t n_begun = 0; // answers that have a token
    all.ended        = true;
    for (const auto & [index, one] : log.answers) {
        all.ended = all.ended && one.ended;
        all.n_cached += one.n_cached;
        all.n_read += one.n_read;
        all.n_written += one.n_written;
        all.usage.add(one.usage);
        if (one.n_written > 0) {
            n_begun++;
            all.t_first = all.t_first > 0 ? std::min(all.t_first, one.t_first) : one.t_first;
            all.t_last  = std::max(all.t_last, one.t_last);
        }
    }
    std::string text;
    if (all.n_cached + all.n_read + log.n_read > 0) {
        append(text, "%llu tokens read", (unsigned long long) (all.n_read + log.n_read));
        if (all.n_cached > 0) {
            text += " and " + std::to_string(all.n_cached) + " remembered";
        }
    }
    if (all.n_written > 0) {
        append(text, "%llu written", (unsigned long long) all.n_written);
        append(text, "the first after %.2f s", (double) (all.t_first - log.t_start) / 1e6);
    }
    if (all.n_written > n_begun && all.t_last > all.t_first) { // the first comes of the prompt
        append(text, "%.1f tok/s", (double) (all.n_written - n_begun) * 1e6 / (double) (all.t_last - all.t_first));
    }
    const double n_hits   = all.usage.counters[server_usage::HITS],
                 n_slices = n_hits + all.usage.counters[server_usage::MISSES];
    if (n_slices > 0) {
        append(text, "%.0f %% hits", 100 * n_hits / n_slices);
    }
    if (log.failed || !all.ended) {
        append(text, "%s", log.failed ? "ended by an error" : "not to its end");
    }
    return text;
}

void server_request_ends(int status) {
    request_log & log = log_of_request;
    if (!log.runs) {
        return;
    }
    log.runs = false;
    if (server_has_host()) {
        server_host()->answered(log.method.c_str(), log.path.c_str(), status, what_it_took(log).c_str());
    }
}

} // namespace moeoff
