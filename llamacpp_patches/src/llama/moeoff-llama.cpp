#include "moeoff-llama.h"

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory.h"
#include "llama-model.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "../ggml/src/ggml-cpu/moeoff/moeoff-attention.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#ifdef __linux__
#    include <sys/mman.h>
#    include <unistd.h>
#endif

static constexpr uint64_t huge_page = 2 << 20;

// of our nodes
static const char * const gate_name  = "moeoff_gate";
static const char * const fetch_name = "moeoff_fetch";
static const char * const wave_name  = "moeoff_wave";

// tokens whose products are computed together: llama.cpp's usual micro-batch, for which compute buffers have room at
// least
static constexpr int64_t chunk_tokens = 512;

static void do_nothing(ggml_tensor *, int, int, void *) {}

static thread_local bool plans_offloaded = false;

void moeoff_plan_offloaded(bool on) { plans_offloaded = on; }

// its experts are in an expert buffer, or would be
static bool is_offloaded(const ggml_tensor * t) { return moeoff_gate_of(t) || (plans_offloaded && !t->data); }

// the gate that a block's experts belong to, or nullptr, and how many there are
static void * gate_of(std::initializer_list<const ggml_tensor *> experts, int64_t & n_expert) {
    for (const ggml_tensor * t : experts) {
        if (t) {
            n_expert = t->ne[2];
            return moeoff_gate_of(t);
        }
    }
    return nullptr;
}

void moeoff_build_gate(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * ids, ggml_tensor * weights,
    ggml_tensor * gate_input, ggml_tensor * logits, int32_t gating, const void * user, ggml_backend_sched_t sched,
    std::initializer_list<const ggml_tensor *> experts) {
    int64_t n_expert = 0;
    void *  gate     = gate_of(experts, n_expert);
    if (!gate) {
        if (plans_offloaded) { // its sources are alive until it has run
            ggml_tensor * sources[3] = { ids, weights, gate_input };
            ggml_build_forward_expand(
                gf, ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, sources, 3, do_nothing, 1, nullptr));
        }
        return;
    }
    moeoff_gate_set_gating(gate, gating);
    const uint32_t flags = moeoff_gate_flags(gate);
    // grovemoe's chunks have the logits of others
    const bool    with_logits = flags & MOEOFF_FLAG_GATE_LOGITS && logits && logits->ne[0] == n_expert;
    ggml_tensor * args[4]     = { ids, weights, flags & MOEOFF_FLAG_GATE_INPUT ? gate_input : nullptr,
        with_logits ? logits : nullptr };
    const bool    has_device  = moeoff_gate_device_mode(gate, user, ids->ne[0], ids->ne[1]) != MOEOFF_DEVICE_OFF;
    int           n_planes    = 1;
    if (has_device) {
        moeoff_gate_set_sched(gate, sched);
        n_planes = moeoff_gate_n_waves(gate, MOEOFF_VERSION_LOW, ids->ne[0], ids->ne[1]) > 0 ? 3 : 2;
    }
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_I32, has_device ? ids->ne[0] : 1, has_device ? ids->ne[1] : 1,
        n_planes, 1, args, 4, moeoff_gate_node, 1, gate);
    ggml_set_name(node, gate_name);
    ggml_build_forward_expand(gf, node);
}

// the last of our nodes with this name and first source, behind another one if that is given, or nullptr
static ggml_tensor * find_node(
    ggml_cgraph * gf, const char * name, const ggml_tensor * src, const ggml_tensor * behind = nullptr) {
    for (int i = ggml_graph_n_nodes(gf) - 1; i >= 0; i--) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (node == behind) {
            return nullptr;
        }
        if (node->op == GGML_OP_CUSTOM && node->src[0] == src && strcmp(node->name, name) == 0) {
            return node;
        }
    }
    return nullptr;
}

// Has the scheduler copy x into host memory here, where the device has nothing else to do. It copies a tensor once, and
// waits for all that the device has queued before: a CPU node with x behind the device's product would only begin when
// that has ended.
static void build_fetch(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * x, const ggml_tensor * gate_node) {
    if (!find_node(gf, fetch_name, x, gate_node)) {
        ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, &x, 1, do_nothing, 1, nullptr);
        ggml_set_name(node, fetch_name);
        ggml_build_forward_expand(gf, node);
    }
}

static ggml_tensor * build_product(
    ggml_context * ctx, const ggml_tensor * like, ggml_tensor * weights, ggml_tensor * ids) {
    ggml_tensor * node = ggml_mul_mat_id(ctx, weights, like->src[1], ids);
    memcpy(node->op_params, like->op_params, sizeof(node->op_params));
    return node;
}

// of a gate node's ids, or a wave's
static ggml_tensor * plane_of(ggml_context * ctx, ggml_tensor * node, int plane) {
    return ggml_view_2d(ctx, node, node->ne[0], node->ne[1], node->nb[1], (size_t) plane * node->nb[2]);
}

static bool is_product_of(const ggml_tensor * t, const ggml_tensor * gate_node) {
    return t && t->op == GGML_OP_MUL_MAT_ID && t->src[2]->view_src == gate_node;
}

// the sum of a device's product, its first source, and the CPU's of this gate node
static bool is_sum(const ggml_tensor * t, const ggml_tensor * gate_node) {
    return t->op == GGML_OP_ADD && is_product_of(t->src[0], gate_node) && is_product_of(t->src[1], gate_node);
}

// What lies between a block's first products and its last one (biases, scales, adapters, the activation), for other
// first products in the place of those that are there. What does not depend on them is left as it is.
struct block_copy {
    ggml_context *                              ctx;
    const char *                                name; // of the copies
    std::function<ggml_tensor *(ggml_tensor *)> replacement; // of a first product, or nullptr: it is none
    std::map<ggml_tensor *, ggml_tensor *>      made     = {};
    std::vector<ggml_tensor *>                  products = {}; // the replacements

    static constexpr int max_depth = 16; // a block's own nodes are fewer; behind them lies the rest of the model

    ggml_tensor * of(ggml_tensor * t, int depth = 0) {
        if (!t || depth > max_depth) {
            return t;
        }
        const auto known = made.find(t);
        if (known != made.end()) {
            return known->second;
        }
        if (ggml_tensor * other = replacement(t)) {
            products.push_back(other);
            return made[t] = other;
        }
        ggml_tensor * srcs[GGML_MAX_SRC];
        bool          is_changed = false;
        for (int i = 0; i < GGML_MAX_SRC; i++) {
            srcs[i]    = of(t->src[i], depth + 1);
            is_changed = is_changed || srcs[i] != t->src[i];
        }
        if (!is_changed) {
            return made[t] = t;
        }
        ggml_tensor * copy = ggml_dup_tensor(ctx, t);
        copy->op           = t->op;
        copy->flags        = t->flags;
        memcpy(copy->op_params, t->op_params, sizeof(copy->op_params));
        memcpy(copy->nb, t->nb, sizeof(copy->nb));
        memcpy(copy->src, srcs, sizeof(copy->src));
        if (t->view_src) {
            copy->view_src  = srcs[0]->view_src ? srcs[0]->view_src : srcs[0];
            copy->view_offs = t->view_offs;
        }
        ggml_format_name(copy, "%s (%s)", t->name, name);
        return made[t] = copy;
    }
};

// Views are copied to a device one by one: one for all products of a side
static void share_ids(const std::vector<ggml_tensor *> & products, const ggml_tensor * last) {
    for (ggml_tensor * product : products) {
        product->src[2] = last->src[2];
    }
}

// Of a block's last product: the sum of as many as there are waves, with high and with low versions, each from its own
// first products. What another one serves gives zeros.
static ggml_tensor * build_waves(
    ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * first_wave, ggml_tensor * gate_node, void * gate) {
    const int     n_waves     = moeoff_gate_n_waves(gate, MOEOFF_VERSION_HIGH, gate_node->ne[0], gate_node->ne[1]);
    const int     n_low_waves = moeoff_gate_n_waves(gate, MOEOFF_VERSION_LOW, gate_node->ne[0], gate_node->ne[1]);
    ggml_tensor * sum         = first_wave;
    block_copy probe = { ctx, "", [gate_node](ggml_tensor * t) { return is_product_of(t, gate_node) ? t : nullptr; } };
    probe.of(first_wave->src[1]);
    if (probe.products.empty()) { // one of the block's first: the last one adds the waves
        return first_wave;
    }
    share_ids(probe.products, first_wave);
    const auto add = [&](ggml_tensor * ids, bool is_low) {
        const auto slots_of = [&](ggml_tensor * product) {
            return is_low ? moeoff_device_low_slots_of(gate, product->src[0]) : product->src[0];
        };
        const auto other = [&](ggml_tensor * t) {
            return is_product_of(t, gate_node) ? build_product(ctx, t, slots_of(t), ids) : nullptr;
        };
        block_copy    copy    = { ctx, is_low ? "low" : wave_name, other };
        ggml_tensor * product = build_product(ctx, first_wave, slots_of(first_wave), ids);
        product->src[1]       = copy.of(first_wave->src[1]);
        sum                   = ggml_add(ctx, sum, product);
    };
    if (n_low_waves > 0) {
        add(plane_of(ctx, gate_node, 2), true);
    }
    for (int wave = 1; wave < std::max(n_waves, n_low_waves); wave++) {
        // The view has the scheduler wait for the wave before: its slots are written next. Where they are not, the wave
        // before is computed meanwhile, and the gate node's memory, which may still be copied to the device, is not
        // given to the result
        const bool    is_beside = moeoff_gate_is_reordered(gate);
        ggml_tensor * args[2]   = { gate_node->src[0], is_beside ? gate_node : ggml_view_1d(ctx, sum, 1, 0) };
        ggml_tensor * ids       = ggml_custom_4d(ctx, GGML_TYPE_I32, gate_node->ne[0], gate_node->ne[1],
            n_low_waves > 0 ? 2 : 1, 1, args, 2, moeoff_wave_node, 1, gate);
        ggml_set_name(ids, wave_name);
        ids->flags |= is_beside ? GGML_TENSOR_FLAG_BESIDE : 0;
        ggml_build_forward_expand(gf, sum);
        ggml_build_forward_expand(gf, ids);
        if (wave < n_waves) {
            add(plane_of(ctx, ids, 0), false);
        }
        if (wave < n_low_waves) {
            add(plane_of(ctx, ids, 1), true);
        }
    }
    return sum;
}

ggml_tensor * moeoff_build_shared(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * product) {
    ggml_tensor * slots     = moeoff_device_slots_of(product->src[0], product->src[2]->ne[0], product->src[2]->ne[1]);
    ggml_tensor * gate_node = slots ? find_node(gf, gate_name, product->src[2]) : nullptr;
    if (!gate_node || gate_node->ne[2] == 1) {
        return product;
    }
    void *        gate      = moeoff_gate_of(product->src[0]);
    ggml_tensor * on_device = build_product(ctx, product, slots, plane_of(ctx, gate_node, 0));
    if (moeoff_gate_uploads_all(gate)) {
        return build_waves(ctx, gf, on_device, gate_node, gate);
    }
    ggml_tensor * on_host = build_product(ctx, product, product->src[0], plane_of(ctx, gate_node, 1));
    const auto    side_of = [gate_node](int side) { // source of the sums
        return [gate_node, side](ggml_tensor * t) { return is_sum(t, gate_node) ? t->src[side] : nullptr; };
    };
    block_copy device = { ctx, "device", side_of(0) };
    block_copy host   = { ctx, "host", side_of(1) };
    on_device->src[1] = device.of(product->src[1]);
    on_host->src[1]   = host.of(product->src[1]);
    if (device.products.empty()) { // one of the block's first: the last one takes the two apart
        return ggml_add(ctx, on_device, on_host);
    }
    share_ids(device.products, on_device);
    share_ids(host.products, on_host);
    // In this order both compute at the same time: the device's part is only queued, and the CPU's has all of its
    // sources and need not wait. Until then only the gate node is copied to the device, whose memory the CPU's part
    // keeps; later products may get what is still copied: biases are added where the device has them
    for (const ggml_tensor * first : host.products) {
        build_fetch(ctx, gf, first->src[1], gate_node);
    }
    host.products[0]->flags |= GGML_TENSOR_FLAG_BESIDE;
    ggml_build_forward_expand(gf, on_device);
    ggml_build_forward_expand(gf, on_host);
    return ggml_add(ctx, on_device, on_host);
}

ggml_tensor * moeoff_build_chunks(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * cur, ggml_tensor * ids,
    ggml_tensor * weights, const ggml_tensor * experts, ggml_backend_sched_t sched,
    const std::function<ggml_tensor *(ggml_tensor *, ggml_tensor *, ggml_tensor *)> & build) {
    const int64_t n_tokens = cur->ne[1];
    if (n_tokens <= chunk_tokens || experts->ne[1] != cur->ne[0] || ggml_backend_sched_get_n_backends(sched) > 1
        || !is_offloaded(experts)) {
        return build(cur, ids, weights);
    }
    ggml_tensor * out = ggml_cont(ctx, cur); // is overwritten
    for (int64_t first = 0; first < n_tokens; first += chunk_tokens) {
        const int64_t n    = std::min(chunk_tokens, n_tokens - first);
        ggml_tensor * part = build(ggml_view_2d(ctx, cur, cur->ne[0], n, cur->nb[1], first * cur->nb[1]),
            ggml_view_2d(ctx, ids, ids->ne[0], n, ids->nb[1], first * ids->nb[1]),
            ggml_view_3d(ctx, weights, 1, weights->ne[1], n, weights->nb[1], weights->nb[2], first * weights->nb[2]));
        out                = ggml_set_2d_inplace(ctx, out, part, out->nb[1], first * out->nb[1]);
        ggml_build_forward_expand(gf, out);
    }
    return out;
}

uint32_t moeoff_n_more_nodes(const llama_model & model, uint32_t n_tokens) {
    // a wave's views, ids, products, biases, scales, activation and sum
    constexpr uint32_t n_per_version = MOEOFF_MAX_WAVES * 15;
    const uint32_t     n_chunks      = (n_tokens - 1) / chunk_tokens;
    uint32_t           n             = 0;
    for (size_t il = 0; il < model.layers.size(); il++) {
        for (const ggml_tensor * t : { model.layers[il].ffn_down_exps, model.layers[il].ffn_down_chexps }) {
            if (const ggml_tensor * slots = t ? moeoff_device_slots_of(t, 0, 0) : nullptr) {
                n += n_per_version * (moeoff_device_low_slots_of(moeoff_gate_of(t), slots) ? 2 : 1);
            }
            if (t && is_offloaded(t)) {
                // the same, views and adapters, and an addition for each expert
                n += n_chunks * (40 + 2 * model.hparams.n_expert_used((uint32_t) il));
            }
        }
    }
    return n;
}

// Plans the graph of a batch that sees the whole context, and returns the bytes of the CPU backend's work area for it.
// sizes: of each of the scheduler's backends, the bytes of its compute buffer that the graph needs, or nullptr. ctx
// forgets the graph that it computed last.
static uint64_t plan_batch(llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs, size_t * sizes) {
    const int  n_threads = std::max(llama_n_threads(ctx), llama_n_threads_batch(ctx));
    const auto memory    = ctx->get_memory() ? ctx->get_memory()->init_full() : nullptr;
    // split and not allocated: a context that is only planned (no_alloc) stays so
    // pooling asserts that every token has one
    const uint32_t n_outputs = std::min(n_tokens, ctx->get_cparams().n_outputs_max);
    const auto *   graph     = ctx->graph_reserve(n_tokens, n_seqs, n_outputs, memory.get(), true, sizes);
    return graph ? ggml_graph_plan(graph, n_threads, nullptr).work_size : 0;
}

static void context_memory(llama_context * ctx, uint64_t * bytes) {
    std::fill(bytes, bytes + 5, 0);
    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        if (ggml_backend_buft_is_host(buft)) {
            bytes[0] += mb.model;
            bytes[1] += mb.context;
            bytes[2] += mb.compute;
        }
    }
    // allocated by the first graph that needs it, so no buffer tells its size yet
    bytes[3] = plan_batch(ctx, std::min(llama_n_ctx(ctx), llama_n_ubatch(ctx)), llama_n_seq_max(ctx), nullptr);
    bytes[4] = sizeof(float) * llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))
               * (uint64_t) ctx->get_cparams().n_outputs_max;
}

// bytes of all compute buffers; 0: one of them is no ordinary memory, a device's, that may be pinned
static uint64_t cpu_compute_bytes(const llama_context * ctx) {
    uint64_t sum = 0;
    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        if (mb.compute > 0 && buft != ggml_backend_cpu_buffer_type()) {
            return 0;
        }
        sum += mb.compute;
    }
    return sum;
}

// The compute buffer itself, or nullptr: no interface tells it, but a graph of one node lies in it. The scheduler
// forgets how larger graphs lay there.
static ggml_backend_buffer_t compute_buffer(ggml_backend_sched_t sched) {
    const ggml_context_ptr ctx(
        ggml_init({ ggml_tensor_overhead() * 2 + ggml_graph_overhead_custom(2, false), nullptr, true }));
    ggml_tensor * input = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 1);
    ggml_set_input(input);
    ggml_tensor * node = ggml_neg(ctx.get(), input);
    ggml_cgraph * gf   = ggml_new_graph_custom(ctx.get(), 2, false);
    ggml_build_forward_expand(gf, node);
    ggml_backend_sched_reset(sched);
    ggml_backend_buffer_t buffer = ggml_backend_sched_alloc_graph(sched, gf) ? node->buffer : nullptr;
    ggml_backend_sched_reset(sched);
    return buffer;
}

// of a range
struct whole_pages {
    whole_pages(void * data, uint64_t bytes) : first((uint8_t *) data), last(first + bytes) {
#ifdef __linux__
        const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
        begin                = (uint8_t *) (((uintptr_t) first + page - 1) / page * page);
        end                  = std::max(begin, (uint8_t *) ((uintptr_t) last / page * page));
#endif
    }

    uint64_t bytes() const { return end - begin; }

    bool are_resident() const {
#ifdef __linux__
        const size_t               page = (size_t) sysconf(_SC_PAGESIZE);
        std::vector<unsigned char> is_in(bytes() / page);
        return mincore(begin, bytes(), is_in.data()) != 0
               || std::all_of(is_in.begin(), is_in.end(), [](unsigned char c) { return (c & 1) != 0; });
#else
        return true;
#endif
    }

    // each page comes back by itself, not with the rest of a huge one
    void come_singly() const {
#ifdef __linux__
        madvise(begin, bytes(), MADV_NOHUGEPAGE);
#endif
    }

    // zeroes the range, its whole pages by giving them back to the system; false: neither
    bool give_back() const {
#ifdef __linux__
        if (begin < end && madvise(begin, bytes(), MADV_DONTNEED) == 0) {
            std::fill(first, begin, 0);
            std::fill(end, last, 0);
            return true;
        }
#endif
        return false;
    }

    uint8_t * first;
    uint8_t * last;
    uint8_t * begin = nullptr;
    uint8_t * end   = nullptr;
};

static whole_pages pages_of(ggml_backend_buffer_t buffer, uint64_t n_used) {
    const uint64_t size = ggml_backend_buffer_get_size(buffer);
    n_used              = std::min(n_used, size);
    return { (uint8_t *) ggml_backend_buffer_get_base(buffer) + n_used, size - n_used };
}

void moeoff_empty(ggml_backend_buffer_t buffer) {
    const bool is_memory = ggml_backend_buffer_get_type(buffer) == ggml_backend_cpu_buffer_type();
    if (!is_memory || pages_of(buffer, 0).are_resident() || !pages_of(buffer, 0).give_back()) {
        ggml_backend_buffer_clear(buffer, 0);
    }
}

static int batch_memory(llama_context * ctx, uint32_t n_tokens, bool gives_back, uint64_t * bytes) {
    const uint64_t all = cpu_compute_bytes(ctx);
    if (all == 0) {
        return -1;
    }
    const uint32_t n_seqs = llama_n_seq_max(ctx);
    n_tokens              = std::min({ std::max(n_tokens, n_seqs), llama_n_ctx(ctx), llama_n_ubatch(ctx) });
    // caches of their own divide a batch among them, also one of a single sequence
    n_tokens = (n_tokens + n_seqs - 1) / n_seqs * n_seqs;
    bytes[0] = bytes[1] = 0;
    // states that grow with the square of a sequence's tokens take more for one than for several
    for (const uint32_t n : { 1u, n_seqs }) {
        std::vector<size_t> sizes(ggml_backend_sched_get_n_backends(ctx->get_sched()), 0);
        bytes[1] = std::max<uint64_t>(bytes[1], plan_batch(ctx, n_tokens, n, sizes.data()));
        // backends with the same memory share a buffer
        bytes[0] = std::max<uint64_t>(bytes[0], *std::max_element(sizes.begin(), sizes.end()));
    }
    // what is touched in part may be resident as a whole
    bytes[0] = std::min((bytes[0] + huge_page - 1) / huge_page * huge_page, all);
    // The plans have made ctx forget its last graph. One that needs more than the compute buffer has also freed it, and
    // the scheduler would compute a graph like the planned one without any: it has to plan that anew.
    ggml_backend_buffer_t buffer = compute_buffer(ctx->get_sched());
    if (!gives_back) {
        return 0;
    }
    return buffer && (bytes[0] == all || pages_of(buffer, bytes[0]).give_back()) ? 0 : -1;
}

static uint64_t unused_in(const llama_kv_cache & cache, bool has_values, uint32_t n_tokens, bool gives_back) {
    if (cache.get_n_stream() != 1) { // a batch is divided among them
        return 0;
    }
    const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    const uint64_t used = (uint64_t) cache.get_cells(0).used_max_p1() + n_tokens; // free cells below are filled first
    uint64_t       sum  = 0;
    const auto     add  = [&](const ggml_tensor * rows) { // [n_embd, n_cells]
        if (!rows->data || ggml_backend_buffer_get_type(rows->buffer) != ggml_backend_cpu_buffer_type()
            || used >= (uint64_t) rows->ne[1]) {
            return;
        }
        const whole_pages unused((uint8_t *) rows->data + used * rows->nb[1], ggml_nbytes(rows) - used * rows->nb[1]);
        if (gives_back) {
            unused.come_singly();
        }
        sum += !gives_back || unused.give_back() ? unused.bytes() : 0;
    };
    for (const uint32_t il : cache.get_layer_ids()) {
        add(cache.get_k_storage(il));
        if (has_values) {
            llama_kv_cache::slot_info first_stream;
            first_stream.s0 = first_stream.s1 = 0;
            ggml_reset(ctx.get());
            // no interface tells the tensor itself
            const ggml_tensor * values = cache.get_v(ctx.get(), il, 1, first_stream);
            if (values->nb[1] <= values->nb[2]) { // else each cell has something in every row
                add(values->view_src);
            }
        }
    }
    return sum;
}

// The KV caches of a context, but those that are laid out otherwise. At most two.
static std::vector<const llama_kv_cache *> caches_of(const llama_context * ctx) {
    const llama_memory_i * memory = ctx->get_memory();
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        memory = hybrid->get_mem_attn();
    } else if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        memory = hybrid->get_mem_attn();
    }
    if (const auto * windows = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return { windows->get_base(), windows->get_swa() };
    }
    const auto * cache = dynamic_cast<const llama_kv_cache *>(memory);
    return cache ? std::vector<const llama_kv_cache *> { cache } : std::vector<const llama_kv_cache *>();
}

uint64_t moeoff_unused_state(const llama_context * ctx, uint32_t n_tokens, bool gives_back) {
    uint64_t sum = 0;
    for (const llama_kv_cache * cache : caches_of(ctx)) {
        sum += unused_in(*cache, !ctx->get_model().hparams.is_mla(), n_tokens, gives_back);
    }
    return sum;
}

bool moeoff_attend_context_in_f32(const llama_context * ctx) {
    bool         any     = false;
    const auto & hparams = ctx->get_model().hparams;
    for (const llama_kv_cache * cache : caches_of(ctx)) {
        for (const uint32_t il : cache->get_layer_ids()) {
            any = moeoff_attend_in_f32(
                      cache->get_k_storage(il), (int) hparams.n_embd_head_k(il), (int) hparams.n_embd_head_v(il))
                  || any;
        }
    }
    return any;
}

void * moeoff_layer_device(const llama_context * ctx, int32_t layer) {
    ggml_backend_dev_t device = ctx->get_model().dev_layer(layer);
    return device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU ? device : nullptr;
}

void moeoff_device_memory(const llama_context * ctx, void * device, uint64_t * bytes) {
    std::fill(bytes, bytes + 3, 0);
    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        if (!ggml_backend_buft_is_host(buft) && ggml_backend_buft_get_device(buft) == device) {
            bytes[0] += mb.model;
            bytes[1] += mb.context;
            bytes[2] += mb.compute;
        }
    }
}

int moeoff_replan(llama_context * ctx) {
    try {
        // as it is: all that it does is to ask for new plans
        ctx->set_embeddings_layer_inp(0, ctx->get_cparams().embeddings_layer_inp[0]);
        ctx->sched_reserve();
        return 0;
    } catch (const std::exception &) {
        return -1;
    }
}

int moeoff_context_memory(llama_context * ctx, uint64_t * bytes) {
    try {
        context_memory(ctx, bytes);
        return 0;
    } catch (const std::exception &) {
        return -1;
    }
}

int moeoff_batch_memory(llama_context * ctx, uint32_t n_tokens, bool gives_back, uint64_t * bytes) {
    try {
        return batch_memory(ctx, n_tokens, gives_back, bytes);
    } catch (const std::exception &) {
        return -1;
    }
}

// --- what ggml asserts ---

static thread_local int      guard_depth = 0;       // of this thread
static ggml_abort_callback_t others      = nullptr; // of a program around this one

// ggml's own backtrace is a child's, and the children of several threads that meet an assertion at once wait for each
// other
static void on_assertion(const char * message) {
    if (guard_depth > 0) {
        throw std::runtime_error(message);
    }
    static std::atomic_flag is_ending = ATOMIC_FLAG_INIT;
    while (is_ending.test_and_set()) { // the first thread ends all
        std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    if (others) {
        others(message);
    } else {
        fprintf(stderr, "llama.cpp ends this process, as something that it relies on does not hold: %s\n", message);
    }
}

void moeoff_guard(int32_t more) {
    static std::mutex           mutex;
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  before = ggml_set_abort_callback(on_assertion);
    others                             = before == on_assertion ? others : before;
    guard_depth += more;
}

// --- what a binding would otherwise mirror structs of ggml's for ---

void * moeoff_overrides_new(const char * const * patterns, void * const * buffer_types, int32_t n) {
    size_t bytes = sizeof(llama_model_tensor_buft_override) * ((size_t) n + 1);
    for (int32_t i = 0; i < n; i++) {
        bytes += strlen(patterns[i]) + 1;
    }
    auto * entries = (llama_model_tensor_buft_override *) malloc(bytes);
    if (entries) {
        char * text = (char *) (entries + n + 1);
        for (int32_t i = 0; i < n; i++) {
            entries[i] = { strcpy(text, patterns[i]), (ggml_backend_buffer_type_t) buffer_types[i] };
            text += strlen(patterns[i]) + 1;
        }
        entries[n] = { nullptr, nullptr };
    }
    return entries;
}

void moeoff_overrides_free(void * overrides) { free(overrides); }

void * moeoff_threadpool_new(const int32_t * cores, int32_t n_cores, int32_t n_threads, bool one_each) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    for (int32_t i = 0; i < n_cores; i++) {
        if (cores[i] < GGML_MAX_N_THREADS) {
            params.cpumask[cores[i]] = true;
        }
    }
    params.strict_cpu = one_each;
    return ggml_threadpool_new(&params);
}

// computed over memory of its own, which is one ordinary number throughout
struct timed_graph {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr memory;
    ggml_cgraph *           graph;
    double                  best = INFINITY; // seconds

    explicit timed_graph(size_t n_tensors)
        : ctx(ggml_init(
              { n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, true })),
          graph(ggml_new_graph_custom(ctx.get(), n_tensors, false)) {}
};

// in turn, so that none finds what it reads in a cache. false: no memory, or one could not be computed
static bool time_graphs(std::vector<timed_graph> & graphs, int32_t n_threads, void * threadpool, double seconds) {
    // a byte of which F32, F16, BF16 and the scales of all types are ordinary numbers: zeros are slow where a scale is
    // tiny, as MXFP4's then is
    constexpr uint8_t ordinary = 0x38;
    ggml_backend_ptr  backend(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    ggml_backend_cpu_set_threadpool(backend.get(), (ggml_threadpool_t) threadpool);
    for (timed_graph & t : graphs) {
        t.memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(t.ctx.get(), ggml_backend_cpu_buffer_type()));
        if (!t.memory) {
            return false;
        }
        moeoff_adopt_dense(t.memory.get());
        ggml_backend_buffer_clear(t.memory.get(), ordinary);
    }
    const int64_t begun = ggml_time_us();
    for (int round = 0; round < 3 || (double) (ggml_time_us() - begun) < seconds * 1e6; round++) {
        for (timed_graph & t : graphs) {
            const int64_t t0 = ggml_time_us();
            if (ggml_backend_graph_compute(backend.get(), t.graph) != GGML_STATUS_SUCCESS) {
                return false;
            }
            t.best = std::min(t.best, (double) (ggml_time_us() - t0) / 1e6);
        }
    }
    return true;
}

int moeoff_time_products(const int32_t * groups, const int32_t * types, const int64_t * n_cols, const int64_t * n_rows,
    int32_t n, int32_t n_groups, int64_t n_tokens, int32_t n_threads, void * threadpool, double seconds,
    double * best) {
    std::vector<timed_graph> timed;
    for (int32_t g = 0; g < n_groups; g++) {
        timed_graph & t = timed.emplace_back(3 * (size_t) n);
        for (int32_t i = 0; i < n; i++) {
            if (groups[i] == g) {
                ggml_tensor * weights = ggml_new_tensor_2d(t.ctx.get(), (ggml_type) types[i], n_cols[i], n_rows[i]);
                ggml_build_forward_expand(
                    t.graph, ggml_mul_mat(t.ctx.get(), weights,
                                 ggml_new_tensor_2d(t.ctx.get(), GGML_TYPE_F32, n_cols[i], n_tokens)));
            }
        }
    }
    if (!time_graphs(timed, n_threads, threadpool, seconds)) {
        return -1;
    }
    for (int32_t g = 0; g < n_groups; g++) {
        best[g] = timed[g].best;
    }
    return 0;
}

static bool are_alike(const ggml_tensor * a, const ggml_tensor * b) {
    return std::equal(a->src, a->src + 3, b->src,
        [](const ggml_tensor * x, const ggml_tensor * y) { return x->type == y->type && ggml_are_same_shape(x, y); });
}

// FLASH_ATTN_EXT like this one, over n_kv positions
static ggml_tensor * attention_like(ggml_context * ctx, const ggml_tensor * op, int64_t n_kv) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const auto         rows_like = [&](const ggml_tensor * t) { // position by position, as a KV cache has them
        return ggml_permute(ctx, ggml_new_tensor_4d(ctx, t->type, t->ne[0], t->ne[2], n_kv, t->ne[3]), 0, 2, 1, 3);
    };
    ggml_tensor * keys = rows_like(k);
    ggml_tensor * values =
        v->view_src && v->view_src == k->view_src // MLA's, a part of the keys
            ? ggml_view_4d(ctx, keys, v->ne[0], n_kv, v->ne[2], v->ne[3], keys->nb[1], keys->nb[2], keys->nb[3], 0)
            : rows_like(v);
    float scale, max_bias, softcap;
    memcpy(&scale, op->op_params, sizeof(float));
    memcpy(&max_bias, op->op_params + 1, sizeof(float));
    memcpy(&softcap, op->op_params + 2, sizeof(float));
    ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_dup_tensor(ctx, q), keys, values,
        mask ? ggml_new_tensor_4d(ctx, mask->type, n_kv, mask->ne[1], mask->ne[2], mask->ne[3]) : nullptr, scale,
        max_bias, softcap);
    ggml_flash_attn_ext_add_sinks(out, sinks ? ggml_dup_tensor(ctx, sinks) : nullptr);
    return out;
}

static double time_attention(
    llama_context * ctx, int32_t n_threads, void * threadpool, uint64_t bytes, double seconds) {
    constexpr size_t n_tensors = 8; // of attention_like
    const auto       memory    = ctx->get_memory() ? ctx->get_memory()->init_full() : nullptr;
    ggml_cgraph *    token     = ctx->graph_reserve(1, 1, 1, memory.get(), true);
    std::vector<std::pair<const ggml_tensor *, int64_t>> kinds; // and how many layers are alike
    for (int i = 0; token && i < ggml_graph_n_nodes(token); i++) {
        const ggml_tensor * op = ggml_graph_node(token, i);
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            const auto known =
                std::find_if(kinds.begin(), kinds.end(), [op](const auto & kind) { return are_alike(kind.first, op); });
            (known == kinds.end() ? kinds.emplace_back(op, 0) : *known).second++;
        }
    }
    if (kinds.empty()) {
        return 0;
    }
    std::vector<timed_graph> timed;
    std::vector<double>      wholes; // times what is timed of each kind
    for (const auto & [op, n_layers] : kinds) {
        const ggml_tensor *k = op->src[1], *v = op->src[2];
        const uint64_t     of_position =
            k->ne[2] * ggml_row_size(k->type, k->ne[0]) + v->ne[2] * ggml_row_size(v->type, v->ne[0]);
        int64_t n_kv = k->ne[1];
        while (n_kv > 1024 && n_kv * of_position > bytes) { // what is beyond takes as long again
            n_kv /= 2;
        }
        const int64_t n = std::clamp<int64_t>(bytes / (n_kv * of_position), 1, n_layers);
        timed_graph & t = timed.emplace_back(n * n_tensors);
        for (int64_t i = 0; i < n; i++) {
            ggml_build_forward_expand(t.graph, attention_like(t.ctx.get(), op, n_kv));
        }
        wholes.push_back((double) n_layers / n * k->ne[1] / n_kv);
    }
    if (!time_graphs(timed, n_threads, threadpool, seconds)) {
        return -1;
    }
    double sum = 0;
    for (size_t i = 0; i < timed.size(); i++) {
        sum += timed[i].best * wholes[i];
    }
    return sum;
}

double moeoff_time_attention(
    llama_context * ctx, int32_t n_threads, void * threadpool, uint64_t bytes, double seconds) {
    try {
        return time_attention(ctx, n_threads, threadpool, bytes, seconds);
    } catch (const std::exception &) {
        return -1;
    }
}

bool moeoff_to_float(int32_t type, const void * data, float * out, int64_t n) {
    const ggml_to_float_t to_float = ggml_get_type_traits((ggml_type) type)->to_float;
    if (to_float) {
        to_float(data, out, n);
    }
    return to_float != nullptr;
}
