#include "moeoff-server-hooks.h"

#include "../../../ggml/src/ggml-cpu/moeoff/moeoff.h"
#include "../../../src/moeoff-llama.h"

#include "llama.h"
#include "moeoff/moeoff-templates.h"
#include "mtmd.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <system_error>

// of stb_image, in libmtmd
extern "C" int stbi_info_from_memory(const unsigned char * data, int size, int * width, int * height, int * n_channels);

namespace moeoff {

static const moeoff_server_hooks * server_hooks = nullptr;
static std::optional<moeoff_stats> seen; // by the decode before; one thread decodes
static llama_context *             draft_context = nullptr;
static const llama_model *         served_model  = nullptr;
static bool                        can_draft     = false;
static std::string                 no_drafts; // why
static std::atomic<int32_t>        prompt_max = INT32_MAX; // see moeoff_server_prompt_max()

// Answers that are computed in the decode of now, and whether it was ended because nobody waits for any of them.
static std::mutex    tasks_mutex;
static std::set<int> tasks_in_progress;
static bool          abandoned = false;

static std::atomic<bool> ended_for_nobody = false; // the decode of now, or the one that has just ended

void server_attach(const moeoff_server_hooks * hooks) {
    server_hooks  = hooks;
    prompt_max    = INT32_MAX;
    seen          = std::nullopt;
    draft_context = nullptr;
    served_model  = nullptr;
    can_draft     = false;
    no_drafts     = "";
    charge_templates(hooks == nullptr ? nullptr : server_request_memory::require_for_templates);
}

bool server_has_host() { return server_hooks != nullptr; }

const moeoff_server_hooks * server_host() { return server_hooks; }

// of server_usage's counters: what an answer calls it, and the store
static const struct {
    const char * name;
    uint64_t moeoff_stats::* counter;
} COUNTERS[server_usage::N_COUNTERS] = {
    { "hits", &moeoff_stats::demand_hits },
    { "device_hits", &moeoff_stats::device_hits },
    { "misses", &moeoff_stats::demand_misses },
    { "bytes_read", &moeoff_stats::bytes_read },
    { "expert_uses", &moeoff_stats::expert_uses },
    { "served_low", &moeoff_stats::served_low },
    { "skipped", &moeoff_stats::skipped },
    { nullptr, &moeoff_stats::stall_ns }, // told in seconds
};

void server_usage::add(const server_usage & share) {
    for (int i = 0; i < N_COUNTERS; i++) {
        counters[i] += share.counters[i];
    }
    cache_bytes = share.cache_bytes;
}

void server_usage::to_json(common_json & timings) const {
    if (server_hooks == nullptr) {
        return;
    }
    const double n_slices = counters[HITS] + counters[MISSES];
    common_json  usage    = {
        { "hit_rate", n_slices > 0 ? counters[HITS] / n_slices : 0.0 },
        { "stall_seconds", counters[STALL_NS] / 1e9 },
        { "cache_bytes", cache_bytes },
    };
    for (int i = 0; i < STALL_NS; i++) {
        usage[COUNTERS[i].name] = std::llround(counters[i]);
    }
    timings["moeoff"] = usage;
}

static bool usage_in_timings(const common_json & answer) {
    if (answer.is_array()) {
        for (const common_json & one : answer) {
            if (one.is_object() && usage_in_timings(one)) {
                return true;
            }
        }
        return false;
    }
    return answer.is_object()
           && ((answer.contains("timings") && answer.at("timings").contains("moeoff"))
               || (answer.contains("__verbose") && usage_in_timings(answer.at("__verbose"))));
}

static void move_usage(common_json & answer) {
    if (answer.is_array()) {
        for (common_json & one : answer) {
            move_usage(one);
        }
        return;
    }
    if (!usage_in_timings(answer)) {
        return;
    }
    if (answer.contains("timings") && answer.at("timings").contains("moeoff")) {
        common_json & timings = answer.at("timings");
        common_json   usage   = timings.at("moeoff");
        timings.erase("moeoff");
        answer["moeoff"] = std::move(usage);
    }
    if (answer.contains("__verbose")) {
        move_usage(answer.at("__verbose"));
    }
}

std::optional<common_json> server_usage_beside_timings(const common_json & answer) {
    if (server_hooks == nullptr || !usage_in_timings(answer)) {
        return std::nullopt;
    }
    common_json moved = answer;
    move_usage(moved);
    return moved;
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

void server_decode::add_task(int id) { tasks.insert(id); }

void server_decode::before() {
    if (server_hooks == nullptr) {
        return;
    }
    runs = true;
    {
        std::lock_guard<std::mutex> lock(tasks_mutex);
        tasks_in_progress.clear();
        // a token is decoded to its end: all that was computed stays
        if (std::find(is_prompt.begin(), is_prompt.end(), 1) != is_prompt.end()) {
            tasks_in_progress = std::move(tasks);
        }
        ended_for_nobody = false;
    }
    if (!seen) { // what warmed the model up is nobody's
        moeoff_get_stats(server_hooks->buffer, &seen.emplace());
    }
    server_hooks->before(tokens.data(), positions.data(), slots.data(), is_prompt.data(), (int32_t) tokens.size());
}

server_decode::~server_decode() {
    if (runs) {
        after(-3); // as of a graph that could not be computed
    }
}

int server_decode::after(int result) {
    if (server_hooks == nullptr) {
        return result;
    }
    runs = false;
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
    for (int i = 0; i < server_usage::N_COUNTERS; i++) {
        share.counters[i] = (now.*COUNTERS[i].counter - (*seen).*COUNTERS[i].counter) / n;
    }
    share.cache_bytes = now.cache_bytes;
    seen              = now;
    char text[1024]   = "";
    if (server_hooks->after(result, (int32_t) tokens.size(), text, sizeof(text)) == 0) {
        return result;
    }
    error = text;
    return result == 0 ? 2 : result;
}

void server_decode::charge(server_usage & usage) const {
    for (size_t i = 0; i < tokens.size(); i++) {
        usage.add(share);
    }
}

bool server_decode::tells_progress() const {
    return server_hooks != nullptr && asks_progress
           && std::find(is_prompt.begin(), is_prompt.end(), 1) != is_prompt.end();
}

double server_decode::computed() const {
    moeoff_stats now;
    moeoff_get_stats(server_hooks->buffer, &now);
    return std::min(
        (double) (now.expert_uses - (*seen).expert_uses) / ((double) tokens.size() * server_hooks->expert_uses), 1.0);
}

server_progress::server_progress(const server_decode & decode, std::function<void(double)> tell) {
    if (!decode.tells_progress()) {
        return;
    }
    try {
        thread = std::thread([this, &decode, tell] {
            std::unique_lock<std::mutex> lock(mutex);
            try {
                while (!ends.wait_for(lock, std::chrono::milliseconds(250), [this] { return ended; })) {
                    tell(decode.computed());
                }
            } catch (const std::exception &) { // progress is no reason to end the process: the client gets none
            }
        });
    } catch (const std::system_error &) { // the system gives this process no more threads
    }
}

server_progress::~server_progress() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        ended = true;
    }
    ends.notify_one();
    if (thread.joinable()) {
        thread.join();
    }
}

server_guard::server_guard() { moeoff_guard(1); }

server_guard::~server_guard() { moeoff_guard(-1); }

server_loan::~server_loan() {
    if (nbytes > 0) {
        char text[1024];
        server_hooks->borrow(-nbytes, text, sizeof(text));
    }
}

std::string server_loan::borrow(int64_t more) {
    char text[1024] = "";
    if (server_hooks == nullptr || more <= 0 || server_hooks->borrow(more, text, sizeof(text)) == 0) {
        nbytes += server_hooks == nullptr ? 0 : more;
        return "";
    }
    return text;
}

void server_loan::require(int64_t more) {
    const std::string why_not = borrow(more);
    if (!why_not.empty()) {
        throw std::invalid_argument(why_not);
    }
}

static thread_local server_request_memory * request = nullptr;

// Beside the body itself, which server_body has weighed, llama-server makes nine copies before it answers: as text, as
// JSON, and on the way from one to the other. Values of JSON take memory of their own, each list and object more: a
// megabyte of brackets would take hundreds.
server_request_memory::server_request_memory(const std::string & body) : outer(request) {
    int64_t nbytes = 9 * (int64_t) body.size();
    for (const char c : body) {
        nbytes += c == '[' || c == '{' ? 256 : c == ':' ? 288 : c == ',' ? 96 : 0;
    }
    if (nbytes > server_loan::in_reserve) {
        loan.require(nbytes);
    }
    request = this;
    begin_template_request();
}

server_request_memory::~server_request_memory() { request = outer; }

bool server_request_memory::require_for_templates(int64_t nbytes) {
    if (request == nullptr) {
        return false;
    }
    if (nbytes > std::max(request->for_templates, server_loan::in_reserve)) {
        request->loan.require(nbytes - request->for_templates);
        request->for_templates = nbytes;
    }
    return true;
}

// SentencePiece's tokenizer keeps a symbol of each character, a pair of neighbours, and what each merged piece came
// from; the others keep a number or two.
server_tokenizing::server_tokenizing(const llama_vocab * vocab, const std::string & text) {
    const int64_t nbytes = (int64_t) text.size() * (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_SPM ? 192 : 32);
    if (nbytes > 16 * server_loan::in_reserve) {
        loan.require(nbytes);
    }
}

// Of each pixel, what mtmd and stb_image hold at most: 3 bytes of the bitmap, 3 of what it is copied from, 6 of a
// progressive JPEG's coefficients, 3 of its planes; later 12 of floats. Sound, of 4 kB for a second at least, becomes
// floats at 16 kHz, twice.
static int64_t unpacked_bytes(const std::vector<uint8_t> & file) {
    int width, height, n_channels;
    if (stbi_info_from_memory(file.data(), (int) file.size(), &width, &height, &n_channels)) {
        return (int64_t) width * height * 16;
    }
    return (int64_t) file.size() * 32;
}

server_media_memory::server_media_memory(const std::vector<std::vector<uint8_t>> & files) {
    int64_t nbytes = 0;
    for (const auto & file : files) {
        nbytes += unpacked_bytes(file);
    }
    loan.require(nbytes);
}

server_media_decode::server_media_decode(
    llama_context * ctx, const mtmd_input_chunk * chunk, int32_t position, int32_t slot, int task) {
    const size_t  n_tokens    = mtmd_input_chunk_get_n_tokens(chunk);
    const int32_t n_positions = mtmd_input_chunk_get_n_pos(chunk);
    for (size_t i = 0; i < n_tokens; i++) { // of some models, a picture has more tokens than positions
        decode.add(
            LLAMA_TOKEN_NULL, position + std::min((int32_t) i, std::max(n_positions - 1, 0)), slot, /* prompt */ true);
    }
    decode.add_task(task);
    // from the projector's buffer they are copied three times: for the batch of pictures, in it, and into llama.cpp's
    // own batch
    error = loan.borrow(3 * sizeof(float) * (int64_t) n_tokens * llama_model_n_embd_inp(llama_get_model(ctx)));
}

void server_media_decode::before() { decode.before(); }

int server_media_decode::after(int result) {
    result = decode.after(result);
    error  = decode.error;
    decode.charge(usage);
    return result;
}

void server_media_decode::add_to(server_usage & to) const { to.add(usage); }

bool server_loaded(llama_model * model, llama_context * ctx) {
    served_model = model;
    return server_hooks == nullptr || server_hooks->loaded(model, ctx) == 0;
}

const llama_model * server_model() { return served_model; }

void server_drafts_loaded(bool can, llama_context * ctx) {
    can_draft     = can;
    draft_context = ctx;
}

void server_drafts_failed(const char * why) { no_drafts = why; }

bool server_ready(llama_context * ctx) {
    return server_hooks == nullptr
           || server_hooks->ready(ctx, draft_context, can_draft ? nullptr : no_drafts.c_str()) == 0;
}

void server_listens(const std::string & url) {
    if (server_hooks != nullptr) {
        server_hooks->listening(url.c_str());
    }
}

int32_t server_draft_max(int32_t token) { return server_hooks == nullptr ? INT32_MAX : server_hooks->draft_max(token); }

void server_set_prompt_max(int32_t n_tokens) { prompt_max = n_tokens; }

int32_t server_batch_max(int32_t n_batch, int32_t n_decoded) {
    return n_decoded == 0 ? n_batch
                          : n_decoded + std::min(n_batch - n_decoded, prompt_max.load(std::memory_order_relaxed));
}

bool server_ends_on_purpose() { return server_hooks != nullptr && (*server_hooks->ending != 0 || ended_for_nobody); }

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
        abandoned        = true;
        ended_for_nobody = true;
        moeoff_set_cancelled(server_hooks->buffer, true);
    }
}

std::string server_metrics() {
    if (server_hooks == nullptr) {
        return "";
    }
    std::string text(1 << 16, '\0');
    server_hooks->metrics(text.data(), text.size());
    return text.c_str();
}

} // namespace moeoff
