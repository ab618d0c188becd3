// Functions that the patched llama-server calls. Without hooks (an ordinary llama-server) they do nothing.

#pragma once

#include "moeoff-server.h"

#include "json.h"
#include "llama.h"

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

struct common_params;
struct mtmd_input_chunk;
struct server_prompt;
struct server_prompt_cache;
struct server_prompt_cache_state;
struct server_task_result;
struct server_tokens;

namespace moeoff {

// What one answer took of the expert buffer: shares of the decodes that it had a part in.
struct server_usage {
    enum counter { HITS, DEVICE_HITS, MISSES, BYTES_READ, EXPERT_USES, SERVED_LOW, SKIPPED, STALL_NS, N_COUNTERS };

    double   counters[N_COUNTERS] = {};
    uint64_t cache_bytes          = 0; // that experts could take when it ended

    void add(const server_usage & share);
    void to_json(common_json & timings) const; // adds a "moeoff" object if there are hooks
};

// llama.cpp makes the "timings" of an answer in one place and puts them into it in nine: "moeoff" lies in them until
// the answer is read or written, and stands beside them there. The answer with that done, also in several of them and
// in a "__verbose" one; nothing where it is right as it is.
std::optional<common_json> server_usage_beside_timings(const common_json & answer);

// One decode of the main context.
class server_decode {
  public:
    std::string  error; // why all answers of the batch have failed, if that is known
    server_usage share; // that each of its tokens has in what it took

    server_decode() = default;
    ~server_decode(); // where it was left by an exception, it ends as a failed one
    server_decode(const server_decode &)             = delete;
    server_decode & operator=(const server_decode &) = delete;

    // What llama-server is about to decode: of its batch, n tokens from off, for the answers of its slots.
    template <typename Token, typename Slot>
    server_decode(const std::vector<Token> & batch, int32_t off, int32_t n, const std::vector<Slot> & all) {
        for (int32_t i = off; i < off + n; i++) {
            add(batch[i].token, batch[i].pos, batch[i].id_slot, batch[i].is_prompt);
        }
        for (const Slot & slot : all) {
            if (slot.is_processing()) { // also where the batch has no tokens of it
                add_task(slot.task->id);
                asks_progress = asks_progress || (slot.task->params.stream && slot.task->params.return_progress);
            }
        }
        before();
    }

    void add(int32_t token, int32_t position, int32_t slot, bool is_prompt);
    void add_task(int id); // of an answer that is being computed
    void before();
    int  after(int result); // returned is result, or where only the host has failed, 2: aborted

    template <typename Slot> int after(int result, std::vector<Slot> & all) {
        const bool is_computed = result == 0;
        result                 = after(result);
        for (size_t i = 0; i < slots.size(); i++) {
            Slot & slot = all[slots[i]];
            slot.stats.moeoff.add(share);
            // only the host has failed: remove the batch's cells, as llama_decode() does where it fails
            if (is_computed && result != 0) {
                llama_memory_seq_rm(llama_get_memory(slot.ctx_tgt), slot.id, positions[i], -1);
            }
        }
        return result;
    }

    void charge(server_usage & usage) const; // with all of it

    bool   tells_progress() const; // it reads a prompt, and a client asks how far that is
    double computed() const;       // the share of it that routers have selected experts for; any thread

  private:
    std::vector<int32_t> tokens, positions, slots;
    std::vector<uint8_t> is_prompt;
    std::set<int>        tasks;
    bool                 runs          = false;
    bool                 asks_progress = false;
};

// While one lives, a thread tells what share of a decode is computed, four times a second, if somebody asks.
class server_progress {
  public:
    server_progress(const server_decode & decode, std::function<void(double)> tell);
    ~server_progress();

  private:
    std::mutex              mutex;
    std::condition_variable ends;
    bool                    ended = false;
    std::thread             thread;
};

// While one lives, what ggml asserts on this thread is an exception.
struct server_guard {
    server_guard();
    ~server_guard();
};

// Memory that is borrowed from the experts while it lives. What is borrowed later comes on top.
class server_loan {
  public:
    server_loan() = default;
    ~server_loan();
    server_loan(const server_loan &)             = delete;
    server_loan & operator=(const server_loan &) = delete;

    // bytes of the plan's reserve that a request's values, and all bodies together, take without a loan
    static constexpr int64_t in_reserve = 640 << 10;

    std::string borrow(int64_t more);  // why there is not so much, or nothing
    void        require(int64_t more); // throws that

  private:
    int64_t nbytes = 0;
};

// While a text is tokenized. Throws where there is no room for that.
class server_tokenizing {
  public:
    server_tokenizing(const llama_vocab * vocab, const std::string & text);

  private:
    server_loan loan;
};

// While a request is answered, on its thread.
class server_request_memory {
  public:
    explicit server_request_memory(const std::string & body); // throws: there is not so much
    ~server_request_memory();

    // in all; of this thread's request, if it has one; throws as above
    static bool require_for_templates(int64_t nbytes);

  private:
    server_loan             loan;
    int64_t                 for_templates = 0;
    server_request_memory * outer;
};

// While the files of a request are unpacked.
class server_media_memory {
  public:
    explicit server_media_memory(const std::vector<std::vector<uint8_t>> & files); // throws: there is not so much

  private:
    server_loan loan;
};

// A picture's or sound's embeddings are made and decoded by the main context, between the batches.
class server_media_decode {
  public:
    std::string error; // why it failed, if that is known

    server_media_decode(llama_context * ctx, const mtmd_input_chunk * chunk, int32_t position, int32_t slot, int task);

    void before();
    int  after(int result); // as result; nonzero, too, where something of it could not be read
    void add_to(server_usage & usage) const;

  private:
    server_loan   loan;
    server_decode decode;
    server_usage  usage;
};

bool    server_parse(int argc, char ** argv, common_params & params);
void    server_attach(const moeoff_server_hooks * hooks); // null: an ordinary llama-server again
bool    server_has_host();
bool    server_loaded(llama_model * model, llama_context * ctx);
void    server_drafts_loaded(bool can_draft, llama_context * ctx); // null: drafts need no context of their own
void    server_drafts_failed(const char * why);
bool    server_ready(llama_context * ctx);
void    server_listens(const std::string & url);
int32_t server_draft_max(int32_t token); // behind this one, in tokens
// tokens of a batch that has so many of answers, at most n_batch
int32_t server_batch_max(int32_t n_batch, int32_t n_decoded);
void    server_set_prompt_max(int32_t n_tokens); // of those beside answers. Any thread
// a stop, or a batch that nobody waits for: no error, and nothing to log. Any thread
bool        server_ends_on_purpose();
std::string server_metrics();

// Nobody waits for these tasks any more: if that is true of all in a batch that reads a prompt, its computation ends
// within a layer. Any thread.
void server_abandon(const std::unordered_set<int> & ids);

// The prompt cache is about to take so many bytes in all, or no more any longer; false: there is not so much.
bool server_resize_prompt_cache(size_t nbytes);

// States of so many tokens are about to be written into the main context.
void server_fill_cells(size_t n_tokens);

// A prompt is evicted from the cache: the host may store it, and leaves an empty one.
void server_prompt_evicted(server_prompt_cache_state & state);

// For one that is larger than the cache: null, or where to write what the host will store when it is written.
server_prompt_cache_state * server_prompt_to_host(
    const server_prompt_cache & cache, const server_prompt & prompt, size_t size, size_t draft_size);
// also one of the cache's own
void server_prompt_saved(const server_prompt_cache_state * written);

// Does the host have one that begins with more than n_have of these tokens?
bool server_prompt_on_host(const server_tokens & tokens, size_t n_have);

// The same, and it is the first of the cache now.
bool server_prompt_from_host(server_prompt_cache & cache, const server_tokens & tokens, size_t n_have);

// A request, on the thread that answers it: it has come, has got a result of a task, has been answered. The last one
// says so to the host.
void server_request_begins(const std::string & method, const std::string & path);
void server_request_gets(const server_task_result & result);
void server_request_ends(int status);

extern const char * const SERVER_PAGE; // the path of the host's page, which needs no key

const moeoff_server_hooks * server_host(); // null: an ordinary llama-server

const llama_model * server_model(); // the one that is served; null before server_loaded()

} // namespace moeoff
