// The C interface of llama-server inside a host process (moeoff's Python package), its experts in an expert buffer.
//
// One server at a time in a process: llama-server keeps state in globals. moeoff_serve() blocks until
// moeoff_serve_stop(), which may be called from any thread, or until an error; every callback that does not say
// otherwise runs on its thread, or on the one that decodes for it.
//
// Read by scripts/build/make_abi.py, as moeoff.h: one field and one function per line; run it after an edit.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOEOFF_SERVER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct llama_model;
struct llama_model_tensor_buft_override;
struct moeoff_expert_buffer;

// A prompt outside the context: its tokens, and the states that the model, and the one that makes drafts, had behind
// it. Where states cannot be cut, also behind two of its beginnings, which are its checkpoints: of each three numbers,
// its tokens and its first and last position, and three states, the last of what makes drafts.
struct moeoff_prompt {
    int32_t * tokens;
    int32_t   n_tokens;
    int32_t   n_checkpoints;
    int32_t   checkpoints[6];
    uint8_t * states[8];
    uint64_t  sizes[8];
};

struct moeoff_server_hooks {
    struct moeoff_expert_buffer * buffer; // answers tell what they took of its counters

    const struct llama_model_tensor_buft_override * overrides; // ended by an empty one; come before the user's own

    const int32_t * ending; // not 0: what is computed is ended, and then the server

    int64_t expert_uses; // of one token: experts that it uses, in all layers together

    // The model is loaded and nothing has been computed; nonzero refuses it.
    int (*loaded)(struct llama_model * model, struct llama_context * ctx);

    // All that the server allocates is allocated; nonzero ends it. ctx_draft may be null. no_drafts: why drafts cannot
    // be made, empty if nobody asked for them; null: they can.
    int (*ready)(struct llama_context * ctx, struct llama_context * ctx_draft, const char * no_drafts);

    // From now on requests at the url are answered, and no longer refused with 503.
    void (*listening)(const char * url);

    // Tokens of the draft behind this one, at most. The token will be decoded next.
    int32_t (*draft_max)(int32_t token);

    // Around each decode of the main context: what the batch holds, [n] each; whether its tokens are read (a prompt)
    // and not decoded. Pictures and sounds are decodes of their own; their tokens are -1.
    void (*before)(
        const int32_t * tokens, const int32_t * positions, const int32_t * slots, const uint8_t * is_prompt, int32_t n);

    // result: llama_decode's. Nonzero, with a text in message, fails every answer in the batch.
    int (*after)(int32_t result, int32_t n, char * message, size_t size);

    // A long request, or its pictures and sounds, borrow so many bytes from the experts; or (negative) give them back.
    // Nonzero, with a text in message, refuses the request. Any thread.
    int (*borrow)(int64_t nbytes, char * message, size_t size);

    // Lines for /metrics; any thread.
    void (*metrics)(char * text, size_t size);

    // The prompt cache, which has the prompts that have lost their slot, is about to take so many bytes in all, or
    // takes no more any longer. Nonzero: there is not so much, and the next prompt is not cached.
    int (*resize_prompt_cache)(int64_t nbytes);

    // A request has been answered. took: what its answers were, and what they took; empty where nothing was computed.
    // Null: nobody asks, and the server's own log goes to its file alone, if there is one. Any thread.
    void (*answered)(const char * method, const char * path, int32_t status, const char * took);

    // Whether a prompt of so many tokens that is evicted from the prompt cache would be stored. If so, it is handed
    // over, and lives until moeoff_prompt_free(). Neither is asked of prompts with pictures.
    int (*accept_prompt)(const int32_t * tokens, int32_t n_tokens, uint64_t nbytes);
    void (*store_prompt)(struct moeoff_prompt * prompt);

    // A prompt is about to be computed, of which the first n_have tokens are in memory. Nonzero: there is one that
    // begins with more of it, and that comes back sooner than those are computed; its sizes are in prompt.
    int (*find_prompt)(const int32_t * tokens, int32_t n_tokens, int32_t n_have, struct moeoff_prompt * prompt);

    // Reads it to where prompt points now. Nonzero: it cannot be read.
    int (*read_prompt)(const struct moeoff_prompt * prompt);

    // States of so many tokens are about to be written into the context, not by a decode: they take cells of its KV
    // cache as a batch of them would.
    void (*fill_cells)(int32_t n_tokens);

    // Names, separated by commas, that requests may give as Host or Origin beside those of the loopback interface.
    // Null: any name.
    const char * allowed_hosts;
    int32_t      checks_sockets; // also of requests on Unix sockets: a proxy passes those of others on

    const char * page; // what GET /moeoff answers, without a key: HTML that holds nothing of anybody's
};

// Arguments as llama-server's. Returns 0 after a stop, and else what llama-server returns.
MOEOFF_SERVER_API int moeoff_serve(int argc, char ** argv, const struct moeoff_server_hooks * hooks);

// Whether llama-server takes these arguments; if not, why the first of them cannot be in message. Loads nothing.
MOEOFF_SERVER_API bool moeoff_server_check(int argc, char ** argv, char * message, size_t size);

// llama-server's own table of options: of each a line with the number of its values, its names, those of the opposite,
// and the variable that gives it, divided by tabs, names by blanks. Static.
MOEOFF_SERVER_API const char * moeoff_server_options(void);

// From now on the program at this path runs the chat templates of this process.
MOEOFF_SERVER_API void moeoff_isolate_templates(const char * program);

// Whether the build has the web page.
MOEOFF_SERVER_API bool moeoff_serve_has_page(void);

// Bytes in host memory of the projector that the arguments name: [0] its weights, [1] what it computes its largest
// picture or sound with, one at a time. Returns the numbers of one embedding, which the model's must equal; or 0, with
// a text in message. Loads nothing.
MOEOFF_SERVER_API int32_t moeoff_projector_memory(
    int argc, char ** argv, uint64_t * bytes, char * message, size_t size);

// Any thread.
MOEOFF_SERVER_API void moeoff_prompt_free(struct moeoff_prompt * prompt);

// moeoff_abi_layout() of the structs above.
MOEOFF_SERVER_API const char * moeoff_server_layout(void);

// Tokens of prompts that are read in one batch with tokens of answers, which wait for it, at most. Any thread.
MOEOFF_SERVER_API void moeoff_server_prompt_max(int32_t n_tokens);

// Every answer ends, and then the server.
MOEOFF_SERVER_API void moeoff_serve_stop(void);

#ifdef __cplusplus
}
#endif
