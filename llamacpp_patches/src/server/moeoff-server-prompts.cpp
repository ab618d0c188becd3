// Prompts on their way from the prompt cache to the host, and back.

#include "moeoff-server-hooks.h"

#include "../server-task.h"

#include <memory>
#include <new>

namespace moeoff {

// A prompt that the cache has evicted and the host stores, with what its pointers lead to.
struct evicted_prompt : moeoff_prompt {
    llama_tokens              text;
    server_prompt_cache_state state;
};

static std::unique_ptr<evicted_prompt> beside; // the one that is written now, on the thread that serves

static bool accepted(const server_prompt & prompt, size_t nbytes) {
    const moeoff_server_hooks * host = server_host();
    if (host == nullptr || prompt.tokens.has_mtmd) {
        return false;
    }
    const llama_tokens & text = prompt.tokens.get_tokens();
    return host->accept_prompt(text.data(), (int32_t) text.size(), nbytes) != 0;
}

static void hand_over(std::unique_ptr<evicted_prompt> prompt) {
    prompt->text       = prompt->state.prompt.tokens.get_tokens();
    prompt->tokens     = prompt->text.data();
    prompt->n_tokens   = (int32_t) prompt->text.size();
    prompt->state_data = prompt->state.data.main.data();
    prompt->state_size = prompt->state.data.main.size();
    prompt->draft_data = prompt->state.data.drft.data();
    prompt->draft_size = prompt->state.data.drft.size();
    server_host()->store_prompt(prompt.release());
}

void server_prompt_evicted(server_prompt_cache_state & state) {
    if (accepted(state.prompt, state.data.main.size() + state.data.drft.size())) {
        auto prompt   = std::make_unique<evicted_prompt>();
        prompt->state = std::move(state);
        prompt->state.prompt.checkpoints.clear(); // which stay behind
        hand_over(std::move(prompt));
    }
}

server_prompt_cache_state * server_prompt_to_host(const server_prompt_cache & cache, const server_prompt & prompt, size_t size, size_t draft_size) {
    if (!accepted(prompt, size + draft_size) || !server_resize_prompt_cache(cache.size() + size + draft_size)) {
        return nullptr;
    }
    try {
        beside = std::make_unique<evicted_prompt>();
        beside->state.data.main.resize(size);
        beside->state.data.drft.resize(draft_size);
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
    const moeoff_server_hooks * host = server_host();
    moeoff_prompt stored = {};
    return host != nullptr && !tokens.has_mtmd &&
           host->find_prompt(tokens.get_tokens().data(), (int32_t) tokens.size(), (int32_t) n_have, &stored) != 0;
}

bool server_prompt_from_host(server_prompt_cache & cache, const server_tokens & tokens, size_t n_have) {
    const moeoff_server_hooks * host = server_host();
    moeoff_prompt stored = {};
    if (host == nullptr || tokens.has_mtmd) {
        return false;
    }
    const llama_tokens & text = tokens.get_tokens();
    if (!host->find_prompt(text.data(), (int32_t) text.size(), (int32_t) n_have, &stored) ||
        !server_resize_prompt_cache(cache.size() + stored.state_size + stored.draft_size)) {
        return false;
    }
    try {
        llama_tokens       whole(stored.n_tokens);
        server_prompt_data data;
        data.main.resize(stored.state_size);
        data.drft.resize(stored.draft_size);
        stored.tokens     = whole.data();
        stored.state_data = data.main.data();
        stored.draft_data = data.drft.data();
        if (host->read_prompt(&stored) == 0) {
            cache.states.push_front({ { server_tokens(whole, /* has_mtmd */ false), {} }, std::move(data) });
            return true;
        }
    } catch (const std::bad_alloc &) {
    }
    server_resize_prompt_cache(cache.size());
    return false;
}

} // namespace moeoff

void moeoff_prompt_free(moeoff_prompt * prompt) {
    delete static_cast<moeoff::evicted_prompt *>(prompt);
}
