// Prompts on their way from the prompt cache to the host, and back.

#include "moeoff-server-hooks.h"

#include "../server-task.h"

#include <memory>
#include <new>

namespace moeoff {

// A prompt that is the host's, with what its pointers lead to.
struct server_given_prompt : moeoff_prompt {
    llama_tokens              text;
    server_prompt_cache_state state;
};

static std::unique_ptr<server_given_prompt> beside; // the one that is written now, on the thread that serves

static bool wanted(const server_prompt & prompt, size_t nbytes) {
    const moeoff_server_hooks * host = server_host();
    if (host == nullptr || prompt.tokens.has_mtmd || !prompt.checkpoints.empty()) {
        return false;
    }
    const llama_tokens & text = prompt.tokens.get_tokens();
    return host->wants(text.data(), (int32_t) text.size(), nbytes) != 0;
}

static void give(std::unique_ptr<server_given_prompt> given) {
    given->text       = given->state.prompt.tokens.get_tokens();
    given->tokens     = given->text.data();
    given->n_tokens   = (int32_t) given->text.size();
    given->state_data = given->state.data.main.data();
    given->state_size = given->state.data.main.size();
    given->draft_data = given->state.data.drft.data();
    given->draft_size = given->state.data.drft.size();
    server_host()->takes(given.release());
}

void server_prompt_drops(server_prompt_cache_state & state) {
    if (wanted(state.prompt, state.size())) {
        auto given   = std::make_unique<server_given_prompt>();
        given->state = std::move(state);
        give(std::move(given));
    }
}

server_prompt_cache_state * server_prompt_beside(const server_prompt_cache & cache, const server_prompt & prompt, size_t size, size_t draft_size) {
    if (!wanted(prompt, size + draft_size) || !server_keeps_prompts(cache.size() + size + draft_size)) {
        return nullptr;
    }
    try {
        beside = std::make_unique<server_given_prompt>();
        beside->state.data.main.resize(size);
        beside->state.data.drft.resize(draft_size);
    } catch (const std::bad_alloc &) {
        beside.reset();
        server_keeps_prompts(cache.size());
        return nullptr;
    }
    beside->state.prompt.tokens = prompt.tokens.clone();
    return &beside->state;
}

void server_prompt_saved(const server_prompt_cache_state * written) {
    if (beside != nullptr && written == &beside->state) {
        give(std::move(beside));
    }
}

bool server_prompt_comes_back(server_prompt_cache & cache, const server_tokens & tokens, size_t n_have) {
    const moeoff_server_hooks * host  = server_host();
    moeoff_prompt               found = {};
    if (host == nullptr || tokens.has_mtmd) {
        return false;
    }
    const llama_tokens & text = tokens.get_tokens();
    if (!host->finds(text.data(), (int32_t) text.size(), (int32_t) n_have, &found) ||
        !server_keeps_prompts(cache.size() + found.state_size + found.draft_size)) {
        return false;
    }
    try {
        llama_tokens       whole(found.n_tokens);
        server_prompt_data data;
        data.main.resize(found.state_size);
        data.drft.resize(found.draft_size);
        found.tokens     = whole.data();
        found.state_data = data.main.data();
        found.draft_data = data.drft.data();
        if (host->reads(&found) == 0) {
            cache.states.push_front({ { server_tokens(whole, /* has_mtmd */ false), {} }, std::move(data) });
            return true;
        }
    } catch (const std::bad_alloc &) {
    }
    server_keeps_prompts(cache.size());
    return false;
}

} // namespace moeoff

void moeoff_serve_forget(moeoff_prompt * prompt) {
    delete static_cast<moeoff::server_given_prompt *>(prompt);
}
