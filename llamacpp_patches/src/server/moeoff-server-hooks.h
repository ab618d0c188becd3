// What the patched llama-server calls; without hooks (an ordinary llama-server) nothing happens.

#pragma once

#include "moeoff-server.h"

#include "json.h"

#include <set>
#include <string>
#include <unordered_set>
#include <vector>

namespace moeoff {

// What one answer took of the expert buffer: shares of the decodes that it had a part in.
struct server_usage {
    double hits = 0, device_hits = 0, misses = 0, bytes_read = 0, stall_ns = 0, uses = 0, served_low = 0, skipped = 0, rerouted = 0;
    double rerouted_margin = 0; // the largest so far

    void to_json(common_json & out) const; // adds a "moeoff" object if there are hooks
};

// One decode of the main context.
class server_decode {
  public:
    void add(int32_t token, int32_t position, int32_t slot, bool is_prompt);
    void add_task(int id); // of an answer that is being computed, whether this batch has tokens of it or not
    void before();

    // Why all answers of the batch have failed, or nothing; usage(slot) gets its share of what the decode took.
    template <typename Usage> std::string after(int result, Usage usage) {
        server_usage share;
        const std::string error = finish(result, share);
        for (const int32_t slot : slots) {
            server_usage & of = usage(slot);
            of.hits += share.hits;
            of.misses += share.misses;
            of.bytes_read += share.bytes_read;
            of.stall_ns += share.stall_ns;
            of.uses += share.uses;
            of.served_low += share.served_low;
            of.skipped += share.skipped;
            of.rerouted += share.rerouted;
            of.device_hits += share.device_hits;
            of.rerouted_margin = share.rerouted > 0 ? share.rerouted_margin : of.rerouted_margin;
        }
        return error;
    }

  private:
    std::string finish(int result, server_usage & share);

    std::vector<int32_t> tokens, positions, slots;
    std::vector<uint8_t> is_prompt;
    std::set<int>        tasks;
};

void        server_attach(const moeoff_server_hooks * hooks); // null: an ordinary llama-server again
bool        server_has_host();
bool        server_loaded(llama_model * model, llama_context * ctx);
void        server_draft_loaded(llama_context * ctx); // null: drafts need no context of their own
bool        server_ready(llama_context * ctx, const std::string & url);
bool        server_drafting();
std::string server_metrics();

// Nobody waits for these tasks any more: if that is true of all that are computed, the computation ends within a layer. Any thread.
void server_abandon(const std::unordered_set<int> & ids);

const llama_model * server_model(); // the one that is served; null before server_loaded()

} // namespace moeoff
