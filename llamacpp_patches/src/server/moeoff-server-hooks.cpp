#include "moeoff-server-hooks.h"

#include "../../../ggml/src/ggml-cpu/moeoff/moeoff.h"

#include <cmath>
#include <mutex>

namespace moeoff {

static const moeoff_server_hooks * server_hooks  = nullptr;
static moeoff_stats                seen          = {}; // by the decode before; one thread decodes
static llama_context *             draft_context = nullptr;
static const llama_model *         served_model  = nullptr;

// Answers that are computed in the decode of now, and whether it was ended because nobody waits for any of them.
static std::mutex    tasks_mutex;
static std::set<int> tasks_in_progress;
static bool          abandoned = false;

void server_attach(const moeoff_server_hooks * hooks) {
    server_hooks  = hooks;
    seen          = {};
    draft_context = nullptr;
    served_model  = nullptr;
}

bool server_has_host() {
    return server_hooks != nullptr;
}

void server_usage::to_json(common_json & out) const {
    if (server_hooks == nullptr) {
        return;
    }
    out["moeoff"] = {
        {"hits", std::llround(hits)},
        {"device_hits", std::llround(device_hits)},
        {"misses", std::llround(misses)},
        {"hit_rate", hits + misses > 0 ? hits / (hits + misses) : 0.0},
        {"bytes_read", std::llround(bytes_read)},
        {"stall_seconds", stall_ns / 1e9},
        {"expert_uses", std::llround(uses)},
        {"served_low", std::llround(served_low)},
        {"skipped", std::llround(skipped)},
        {"rerouted", std::llround(rerouted)},
        {"rerouted_margin", rerouted_margin},
    };
}

void server_decode::add(int32_t token, int32_t position, int32_t slot, bool prompt) {
    if (server_hooks == nullptr) {
        return;
    }
    tokens.push_back(token);
    positions.push_back(position);
    slots.push_back(slot);
    is_prompt.push_back(prompt);
}

void server_decode::add_task(int id) {
    tasks.insert(id);
}

void server_decode::before() {
    if (server_hooks == nullptr) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(tasks_mutex);
        tasks_in_progress = std::move(tasks);
    }
    server_hooks->before(tokens.data(), positions.data(), slots.data(), is_prompt.data(), (int32_t) tokens.size());
}

std::string server_decode::finish(int result, server_usage & share) {
    if (server_hooks == nullptr) {
        return "";
    }
    {
        std::lock_guard<std::mutex> lock(tasks_mutex);
        tasks_in_progress.clear();
        if (abandoned) {
            abandoned = false;
            moeoff_set_cancelled(server_hooks->buffer, false);
        }
    }
    moeoff_stats now;
    moeoff_get_stats(server_hooks->buffer, &now);
    const double n = tokens.empty() ? 1 : (double) tokens.size();
    share.hits       = (now.demand_hits - seen.demand_hits) / n;
    share.misses     = (now.demand_misses - seen.demand_misses) / n;
    share.bytes_read = (now.bytes_read - seen.bytes_read) / n;
    share.stall_ns   = (now.stall_ns - seen.stall_ns) / n;
    share.uses       = (now.expert_uses - seen.expert_uses) / n;
    share.served_low = (now.served_low - seen.served_low) / n;
    share.skipped    = (now.skipped - seen.skipped) / n;
    share.device_hits = (now.device_hits - seen.device_hits) / n;
    share.rerouted   = (now.rerouted - seen.rerouted) / n;
    share.rerouted_margin = now.rerouted_margin;
    seen = now;
    char text[1024] = "";
    return server_hooks->after(result, (int32_t) tokens.size(), text, sizeof(text)) != 0 ? text : "";
}

bool server_loaded(llama_model * model, llama_context * ctx) {
    served_model = model;
    return server_hooks == nullptr || server_hooks->loaded(model, ctx) == 0;
}

const llama_model * server_model() {
    return served_model;
}

void server_draft_loaded(llama_context * ctx) {
    draft_context = ctx;
}

bool server_ready(llama_context * ctx, const std::string & url) {
    return server_hooks == nullptr || server_hooks->ready(ctx, draft_context, url.c_str()) == 0;
}

bool server_drafting() {
    return server_hooks == nullptr || *server_hooks->drafting != 0;
}

void server_abandon(const std::unordered_set<int> & ids) {
    if (server_hooks == nullptr) {
        return;
    }
    std::lock_guard<std::mutex> lock(tasks_mutex);
    if (tasks_in_progress.empty()) {
        return;
    }
    for (const int id : ids) {
        tasks_in_progress.erase(id);
    }
    if (tasks_in_progress.empty()) {
        abandoned = true;
        moeoff_set_cancelled(server_hooks->buffer, true);
    }
}

std::string server_metrics() {
    if (server_hooks == nullptr) {
        return "";
    }
    std::string text(1 << 14, '\0');
    server_hooks->metrics(text.data(), text.size());
    return text.c_str();
}

} // namespace moeoff
