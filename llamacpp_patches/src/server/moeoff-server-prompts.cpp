// The host's side of the prompt cache (patch 0017): memory for the cache, and prompts that move to the host and back.

#include "moeoff-server-hooks.h"

#include "../server-task.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>

namespace moeoff {

// A prompt that the cache has evicted and the host stores, with what its pointers lead to.
struct evicted_prompt : moeoff_prompt {
    llama_tokens              text;
    server_prompt_cache_state state;
};

void server_fill_cells(size_t n_tokens) {
    if (const moeoff_server_hooks * host = server_host(); host != nullptr) {
        host->fill_cells((int32_t) n_tokens);
    }
}

bool server_resize_prompt_cache(size_t nbytes) {
    const moeoff_server_hooks * host = server_host();
    return host == nullptr || host->resize_prompt_cache((int64_t) nbytes) == 0;
}

static std::unique_ptr<evicted_prompt> beside; // the one that is written now, on the thread that serves

static bool accepted(const server_prompt & prompt, size_t nbytes) {
    const moeoff_server_hooks * host = server_host();
    if (host == nullptr || prompt.tokens.has_mtmd) {
        return false;
    }
    const llama_tokens & text = prompt.tokens.get_tokens();
    return host->accept_prompt(text.data(), (int32_t) text.size(), nbytes) != 0;
}

// Where the states of a prompt lie.
static void point_at(moeoff_prompt & prompt, server_prompt_cache_state & state) {
    int n                = 0;
    prompt.n_checkpoints = 0;
    for (std::vector<uint8_t> * data : { &state.data.main, &state.data.drft }) {
        prompt.states[n]  = data->data();
        prompt.sizes[n++] = data->size();
    }
    for (common_prompt_checkpoint & checkpoint : state.prompt.checkpoints) {
        int32_t * numbers = prompt.checkpoints + 3 * prompt.n_checkpoints++;
        numbers[0]        = (int32_t) checkpoint.n_tokens;
        numbers[1]        = checkpoint.pos_min;
        numbers[2]        = checkpoint.pos_max;
        for (std::vector<uint8_t> * data : { &checkpoint.data_tgt, &checkpoint.data_dft, &checkpoint.data_spec }) {
            prompt.states[n]  = data->data();
            prompt.sizes[n++] = data->size();
        }
    }
}

static void hand_over(std::unique_ptr<evicted_prompt> prompt) {
    prompt->text     = prompt->state.prompt.tokens.get_tokens();
    prompt->tokens   = prompt->text.data();
    prompt->n_tokens = (int32_t) prompt->text.size();
    point_at(*prompt, prompt->state);
    server_host()->store_prompt(prompt.release());
}

// Of a prompt's checkpoints two are stored: another chat goes back to the first, behind the system prompt; the next
// turn to the last.
static bool is_stored(const common_prompt_checkpoint & checkpoint, const server_prompt & prompt) {
    return &checkpoint == &prompt.checkpoints.front() || &checkpoint == &prompt.checkpoints.back();
}

void server_prompt_evicted(server_prompt_cache_state & state) {
    state.prompt.checkpoints.remove_if([&](const auto & checkpoint) { return !is_stored(checkpoint, state.prompt); });
    if (accepted(state.prompt, state.size())) {
        auto prompt   = std::make_unique<evicted_prompt>();
        prompt->state = std::move(state);
        hand_over(std::move(prompt));
    }
}

server_prompt_cache_state * server_prompt_to_host(
    const server_prompt_cache & cache, const server_prompt & prompt, size_t size, size_t draft_size) {
    size_t total = size + draft_size;
    for (const common_prompt_checkpoint & checkpoint : prompt.checkpoints) {
        total += is_stored(checkpoint, prompt) ? checkpoint.size() : 0;
    }
    if (!accepted(prompt, total) || !server_resize_prompt_cache(cache.size() + total)) {
        return nullptr;
    }
    try {
        beside = std::make_unique<evicted_prompt>();
        beside->state.data.main.resize(size);
        beside->state.data.drft.resize(draft_size);
        std::copy_if(prompt.checkpoints.begin(), prompt.checkpoints.end(),
            std::back_inserter(beside->state.prompt.checkpoints),
            [&](const auto & checkpoint) { return is_stored(checkpoint, prompt); });
    } catch (const std::bad_alloc &) {
        beside.reset();
        server_resize_prompt_cache(cache.size());
        return nullptr;
    }
    beside->state.prompt.tokens = prompt.tokens.clone();
    return &beside->state;
}

void server_prompt_saved(const server_prompt_cache_state * written) {
    if (beside != nullptr && written == &beside->state) {
        hand_over(std::move(beside));
    }
}

bool server_prompt_on_host(const server_tokens & tokens, size_t n_have) {
    const moeoff_server_hooks * host   = server_host();
    moeoff_prompt               stored = {};
    return host != nullptr && !tokens.has_mtmd
           && host->find_prompt(tokens.get_tokens().data(), (int32_t) tokens.size(), (int32_t) n_have, &stored) != 0;
}

bool server_prompt_from_host(server_prompt_cache & cache, const server_tokens & tokens, size_t n_have) {
    const moeoff_server_hooks * host   = server_host();
    moeoff_prompt               stored = {};
    if (host == nullptr || tokens.has_mtmd) {
        return false;
    }
    const llama_tokens & text = tokens.get_tokens();
    if (!host->find_prompt(text.data(), (int32_t) text.size(), (int32_t) n_have, &stored)
        || !server_resize_prompt_cache(
            cache.size() + std::accumulate(stored.sizes, stored.sizes + 2 + 3 * stored.n_checkpoints, (size_t) 0))) {
        return false;
    }
    try {
        llama_tokens              whole(stored.n_tokens);
        server_prompt_cache_state state;
        state.data.main.resize(stored.sizes[0]);
        state.data.drft.resize(stored.sizes[1]);
        for (int i = 0; i < stored.n_checkpoints; i++) {
            common_prompt_checkpoint & checkpoint = state.prompt.checkpoints.emplace_back();
            checkpoint.update_pos(
                stored.checkpoints[3 * i], stored.checkpoints[3 * i + 1], stored.checkpoints[3 * i + 2]);
            checkpoint.data_tgt.resize(stored.sizes[2 + 3 * i]);
            checkpoint.data_dft.resize(stored.sizes[3 + 3 * i]);
            checkpoint.data_spec.resize(stored.sizes[4 + 3 * i]);
        }
        stored.tokens = whole.data();
        point_at(stored, state);
        if (host->read_prompt(&stored) == 0) {
            state.prompt.tokens = server_tokens(whole, /* has_mtmd */ false);
            cache.states.push_front(std::move(state));
            return true;
        }
    } catch (const std::bad_alloc &) {
    }
    server_resize_prompt_cache(cache.size());
    return false;
}

} // namespace moeoff

void moeoff_prompt_free(moeoff_prompt * prompt) { delete static_cast<moeoff::evicted_prompt *>(prompt); }
