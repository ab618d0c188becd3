#include "moeoff-device-memory.h"

#include "moeoff-api.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

namespace moeoff {

static ggml_context_ptr make_context() {
    return ggml_context_ptr(ggml_init({ 16 * ggml_tensor_overhead(), nullptr, /* no_alloc */ true }));
}

// the type that all of a tensor's experts are read in, or GGML_TYPE_COUNT
static ggml_type type_of(const expert_map & map, int32_t tensor, version v) {
    const auto & sources = map.sources_of(tensor, v);
    const bool   is_one = !sources.empty() && std::all_of(sources.begin(), sources.end(), [&](const moeoff_source & s) {
        return s.type == sources[0].type;
    });
    return is_one && sources[0].type >= 0 ? (ggml_type) sources[0].type : GGML_TYPE_COUNT;
}

// false: the device cannot compute with them
static bool make_tensors(ggml_context * ctx, const expert_map & map, const gate & g, version v,
    ggml_backend_dev_t device, int32_t n, slot_tensors & out) {
    static const char * const        names[MOEOFF_N_MATRIX] = { "gate_up", "up", "gate", "down" };
    const ggml_backend_buffer_type_t buft                   = ggml_backend_dev_buffer_type(device);
    for (int m = 0; m < MOEOFF_N_MATRIX; m++) {
        if (g.tensors[m] < 0) {
            continue;
        }
        const auto &    info = map.tensor_at(g.tensors[m]).info;
        const ggml_type type = type_of(map, g.tensors[m], v);
        if (type == GGML_TYPE_COUNT || info.ne[0] % ggml_blck_size(type) != 0) {
            return false;
        }
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, info.ne[0], info.ne[1], n);
        ggml_tensor * x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, info.ne[0], 1, 1);
        ggml_tensor * i = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, 1);
        if (!ggml_backend_dev_supports_op(device, ggml_mul_mat_id(ctx, t, x, i))
            || ggml_backend_buft_get_alloc_size(buft, t) > ggml_backend_buft_get_max_size(buft)) {
            return false;
        }
        ggml_format_name(t, "blk.%d.ffn_%s_exps.%sslots", g.layer, names[m], v == LOW ? "low_" : "");
        out[(size_t) m] = t;
    }
    return true;
}

upload_stream::upload_stream(ggml_backend_dev_t device) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device);
    if (!props.caps.async || !pinned) {
        return;
    }
    staging.reset(ggml_backend_buft_alloc_buffer(pinned, n_pieces * piece_bytes));
    if (!staging) {
        return;
    }
    ggml_backend_buffer_clear(staging.get(), 0); // resident, so that the budget counts it
    backend.reset(ggml_backend_dev_init(device, nullptr));
    for (auto & event : copied) {
        event.reset(props.caps.events ? ggml_backend_event_new(device) : nullptr);
    }
    all_copied.reset(props.caps.events ? ggml_backend_event_new(device) : nullptr);
}

void upload_stream::set(ggml_tensor * tensor, size_t offset, const uint8_t * data, size_t nbytes, bool is_pinned) {
    if (!backend) {
        ggml_backend_tensor_set(tensor, data, offset, nbytes);
        return;
    }
    for (size_t done = 0; is_pinned && done < nbytes;) { // one copy may not reach into two chunks
        const size_t n =
            std::min<size_t>(nbytes - done, arena::pin_bytes - (uintptr_t) (data + done) % arena::pin_bytes);
        ggml_backend_tensor_set_async(backend.get(), tensor, data + done, offset + done, n);
        is_busy = true;
        done += n;
    }
    if (is_pinned) {
        return;
    }
    uint8_t * const first = (uint8_t *) ggml_backend_buffer_get_base(staging.get());
    for (size_t done = 0; done < nbytes;) {
        if (n_used == 0 && is_queued[piece]) {
            free_piece();
        }
        uint8_t * const to = first + piece * piece_bytes + n_used;
        const size_t    n  = std::min(piece_bytes - n_used, nbytes - done);
        memcpy(to, data + done, n);
        ggml_backend_tensor_set_async(backend.get(), tensor, to, offset + done, n);
        is_busy = true;
        done += n;
        n_used += n;
        if (n_used == piece_bytes) {
            if (copied[piece]) {
                ggml_backend_event_record(copied[piece].get(), backend.get());
            }
            is_queued[piece] = true;
            piece            = (piece + 1) % n_pieces;
            n_used           = 0;
        }
    }
}

// one of them as a tensor of its own; no view, whose own tensor would have to live as long
static ggml_tensor expert_of(const ggml_tensor * t, int32_t expert) {
    ggml_tensor x = *t;
    x.ne[2]       = 1;
    x.nb[3]       = t->nb[2];
    x.data        = (char *) t->data + (size_t) expert * t->nb[2];
    return x;
}

void upload_stream::copy(ggml_tensor * from, int32_t expert_from, ggml_tensor * to, int32_t expert_to) {
    ggml_tensor src = expert_of(from, expert_from), dst = expert_of(to, expert_to);
    if (backend) {
        ggml_backend_tensor_copy_async(backend.get(), backend.get(), &src, &dst);
        is_busy = true;
    } else {
        ggml_backend_tensor_copy(&src, &dst);
    }
}

void upload_stream::free_piece() {
    if (copied[piece]) {
        ggml_backend_event_synchronize(copied[piece].get());
        is_queued[piece] = false;
    } else {
        wait();
    }
}

void upload_stream::wait() {
    if (is_busy) {
        ggml_backend_synchronize(backend.get());
        is_queued.fill(false);
        is_busy = false;
        n_used  = 0;
    }
}

void upload_stream::wait_on(ggml_backend_t computing) {
    if (is_busy && computing && all_copied) {
        ggml_backend_event_record(all_copied.get(), backend.get());
        ggml_backend_event_wait(computing, all_copied.get());
    } else {
        wait();
    }
}

// bytes that the tensors take in a buffer of their own
static size_t bytes_of(const slot_tensors & tensors, ggml_backend_dev_t device) {
    const ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device);
    size_t                           sum  = 0;
    for (ggml_tensor * t : tensors) {
        sum += t ? GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), ggml_backend_buft_get_alignment(buft)) : 0;
    }
    return sum;
}

size_t device_slot_bytes(
    const expert_map & map, const gate & g, version v, ggml_backend_dev_t device, int32_t n_slots, int32_t n_spare) {
    const auto   ctx = make_context();
    slot_tensors tensors {};
    return ctx && make_tensors(ctx.get(), map, g, v, device, n_slots + n_spare, tensors) ? bytes_of(tensors, device)
                                                                                         : 0;
}

// calls f with each matrix's tensor on a stage of the gate; false: the device cannot have one of that size
template <typename F>
static bool each_on_stage(const expert_map & map, const gate & g, ggml_backend_dev_t device, int32_t n, const F & f) {
    const auto   ctx = make_context();
    slot_tensors tensors {};
    if (!ctx || !make_tensors(ctx.get(), map, g, HIGH, device, n, tensors)) {
        return false;
    }
    for (int m = 0; m < MOEOFF_N_MATRIX; m++) {
        if (const ggml_tensor * t = tensors[(size_t) m]) {
            slot_tensors one {};
            one[(size_t) m] = tensors[(size_t) m];
            f(m, stage_key { device, m, t->type, t->ne[0], t->ne[1] }, one);
        }
    }
    return true;
}

size_t device_stage_bytes(const expert_map & map, const int32_t * gates, int32_t n_gates, ggml_backend_dev_t device,
    int32_t n_stage, int32_t n_spare) {
    std::map<stage_key, size_t> bytes;
    const auto                  count = [&](int, const stage_key & key, const slot_tensors & one) {
        bytes[key] = bytes_of(one, device);
    };
    for (int32_t i = 0; i < n_gates; i++) {
        if (!each_on_stage(map, map.gate_at(gates[i]), device, n_stage + n_spare, count)) {
            return 0;
        }
    }
    size_t sum = 0;
    for (const auto & [key, n] : bytes) {
        sum += n;
    }
    return sum;
}

bool device_memory::allocate(const slot_tensors & planned, ggml_backend_dev_t device, memory & to, slot_tensors & out) {
    to.ctx.reset(ggml_init({ MOEOFF_N_MATRIX * ggml_tensor_overhead(), nullptr, /* no_alloc */ true }));
    for (size_t m = 0; to.ctx && m < planned.size(); m++) {
        if (planned[m]) {
            out[m] = ggml_dup_tensor(to.ctx.get(), planned[m]);
            ggml_set_name(out[m], planned[m]->name);
        }
    }
    to.buffer.reset(to.ctx
                        ? ggml_backend_alloc_ctx_tensors_from_buft(to.ctx.get(), ggml_backend_dev_buffer_type(device))
                        : nullptr);
    if (to.buffer) {
        ggml_backend_buffer_clear(to.buffer.get(), 0); // the slots of zeros stay so
        ggml_backend_buffer_set_usage(to.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return to.buffer != nullptr;
}

bool device_memory::add_stage(
    const expert_map & map, const gate & g, int32_t turn, int32_t n_stage, int32_t n_spare, std::string & error) {
    block &    b            = blocks[(size_t) g.index];
    const auto device       = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(b.versions[HIGH].buffer.get()));
    bool       is_allocated = true;
    const bool is_possible =
        each_on_stage(map, g, device, n_stage + n_spare, [&](int m, const stage_key & key, const slot_tensors & one) {
            auto & [to, t] = stages[{ turn, key }];
            slot_tensors out {};
            if (!t && is_allocated) {
                is_allocated = allocate(one, device, to, out);
                t            = out[(size_t) m];
            }
            b.tensors[STAGE][(size_t) m] = t;
        });
    if (!is_possible || !is_allocated) {
        error = std::string(ggml_backend_dev_name(device)) + " has no room for a stage of " + std::to_string(n_stage)
                + " experts of layer " + std::to_string(g.layer);
    }
    return is_possible && is_allocated;
}

bool device_memory::add(const expert_map & map, const gate & g, version v, ggml_backend_dev_t device, int32_t n_slots,
    int32_t n_spare, std::string & error) {
    const auto   planned = make_context();
    const auto   name    = std::string(ggml_backend_dev_name(device));
    slot_tensors tensors {};
    if (!planned || !make_tensors(planned.get(), map, g, v, device, n_slots + n_spare, tensors)) {
        error = name + " cannot compute with the experts of layer " + std::to_string(g.layer);
        return false;
    }
    block & b = blocks[(size_t) g.index];
    if (!allocate(tensors, device, b.versions[v], b.tensors[v])) {
        error = name + " has no room for " + std::to_string(bytes_of(tensors, device)) + " bytes of experts of layer "
                + std::to_string(g.layer);
        return false;
    }
    b.queues = &queues.try_emplace(device, device).first->second;
    return true;
}

// the same function of each backend that has one
using register_memory   = bool (*)(void * data, size_t nbytes);
using unregister_memory = void (*)(void * data);

static void * function_of(ggml_backend_dev_t device, const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
}

bool device_memory::pin(void * data, size_t nbytes) {
    if (queues.size() != 1) { // one device's alone
        return false;
    }
    const auto f = (register_memory) function_of(queues.begin()->first, "ggml_backend_register_host_buffer");
    return f && f(data, nbytes);
}

void device_memory::unpin(void * data) {
    ((unregister_memory) function_of(queues.begin()->first, "ggml_backend_unregister_host_buffer"))(data);
}

void device_memory::copy(int32_t gate, int32_t matrix, int32_t slot, int32_t stage, bool to_stage) {
    const block &      b   = blocks[(size_t) gate];
    ggml_tensor *const own = b.tensors[HIGH_SLOTS][(size_t) matrix], *const staged = b.tensors[STAGE][(size_t) matrix];
    upload_stream & s = b.queues->of(false);
    if (to_stage) {
        s.copy(own, slot, staged, stage);
    } else {
        s.copy(staged, stage, own, slot);
    }
}

void device_memory::write(int32_t gate, slot_set set, int32_t matrix, int32_t slot, const uint8_t * data, size_t nbytes,
    bool is_ahead, bool is_pinned) {
    ggml_tensor * t = blocks[(size_t) gate].tensors[set][(size_t) matrix];
    GGML_ASSERT(nbytes == t->nb[2]);
    blocks[(size_t) gate].queues->of(is_ahead).set(t, (size_t) slot * t->nb[2], data, nbytes, is_pinned);
}

void device_memory::wait(int32_t gate, bool is_ahead) { blocks[(size_t) gate].queues->of(is_ahead).wait(); }

void device_memory::wait_on_device(int32_t gate) {
    blocks[(size_t) gate].queues->of(false).wait_on(blocks[(size_t) gate].computing);
}

void device_memory::set_computing(int32_t gate, void * backend) {
    block &      b      = blocks[(size_t) gate];
    const auto & buffer = b.versions[HIGH].buffer;
    if (buffer
        && ggml_backend_get_device((ggml_backend_t) backend)
               == ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer.get()))) {
        b.computing = (ggml_backend_t) backend;
    }
}

void device_memory::read(
    int32_t gate, slot_set set, int32_t matrix, int32_t slot, uint8_t * data, size_t nbytes) const {
    const ggml_tensor * t = blocks[(size_t) gate].tensors[set][(size_t) matrix];
    GGML_ASSERT(nbytes == t->nb[2]);
    ggml_backend_tensor_get(t, data, (size_t) slot * t->nb[2], nbytes);
}

} // namespace moeoff

// --- moeoff.h: devices ---

uint64_t moeoff_device_slot_bytes(
    moeoff_expert_buffer * eb, void * device, int32_t gate, int32_t version, int32_t n_slots, int32_t n_spare) {
    const auto & map      = eb->store->experts();
    const bool   is_valid = gate >= 0 && gate < map.n_gates()
                            && (version == MOEOFF_VERSION_HIGH || version == MOEOFF_VERSION_LOW) && n_slots >= 0
                            && n_spare >= 0;
    return is_valid ? moeoff::device_slot_bytes(map, map.gate_at(gate), (moeoff::version) version,
                          (ggml_backend_dev_t) device, n_slots, n_spare)
                    : 0;
}

uint64_t moeoff_device_stage_bytes(moeoff_expert_buffer * eb, void * device, const int32_t * gates, int32_t n_gates,
    int32_t n_stage, int32_t n_spare) {
    const auto & map      = eb->store->experts();
    const bool   is_valid = n_stage >= 0 && n_spare >= 0 && std::all_of(gates, gates + n_gates, [&](int32_t g) {
        return g >= 0 && g < map.n_gates();
    });
    return is_valid ? moeoff::device_stage_bytes(map, gates, n_gates, (ggml_backend_dev_t) device, n_stage, n_spare)
                    : 0;
}

int moeoff_set_device_mode(moeoff_expert_buffer * eb, int32_t mode) {
    return moeoff::guarded(-1, [&]() -> int {
        if (mode < MOEOFF_DEVICE_OFF || mode > MOEOFF_DEVICE_REORDERED
            || !eb->store->set_device_mode((moeoff_device_mode) mode)) {
            return moeoff::set_last_error("there are no slots on a device, or there is no such mode");
        }
        return 0;
    });
}

int moeoff_set_device_slots(moeoff_expert_buffer * eb, int32_t mode, const uint64_t * devices, const int32_t * n_slots,
    const int32_t * n_low_slots, int32_t n_gates, int32_t n_spare, int32_t n_uploads, int32_t n_stage,
    int32_t n_stages) {
    return moeoff::guarded(-1, [&]() -> int {
        moeoff::store & s   = *eb->store;
        const auto &    map = s.experts();
        if (!s.started() || mode < MOEOFF_DEVICE_OFF || mode > MOEOFF_DEVICE_REORDERED || n_gates != map.n_gates()
            || n_spare < 1 || n_uploads < -1 || n_stages < 0 || n_stages > 2 || n_stage < n_stages) {
            return moeoff::set_last_error(
                "the buffer is not running, or there is no such mode, or not as many gates or stages");
        }
        s.set_device(MOEOFF_DEVICE_OFF, 0, 0, {}, nullptr); // what was there gives its memory back first
        auto                 memory = std::make_unique<moeoff::device_memory>(n_gates);
        std::string          error;
        bool                 is_any = false;
        std::vector<int32_t> slots((size_t) n_gates, 0), low_slots((size_t) n_gates, 0);
        for (int32_t i = 0; i < n_gates && mode != MOEOFF_DEVICE_OFF; i++) {
            if (!devices[i] || n_slots[i] < 1) {
                continue;
            }
            slots[(size_t) i]     = n_slots[i];
            low_slots[(size_t) i] = map.has_low() ? n_low_slots[i] : 0;
            for (const auto v : { moeoff::HIGH, moeoff::LOW }) {
                const int32_t n = v == moeoff::LOW ? low_slots[(size_t) i] : slots[(size_t) i];
                if (n > 0 && !memory->add(map, map.gate_at(i), v, (ggml_backend_dev_t) devices[i], n, n_spare, error)) {
                    return moeoff::set_last_error(error);
                }
            }
            if (n_stages > 0 && !memory->add_stage(map, map.gate_at(i), i % n_stages, n_stage, n_spare, error)) {
                return moeoff::set_last_error(error);
            }
            is_any = true;
        }
        if (is_any) {
            s.set_device(
                (moeoff_device_mode) mode, n_uploads, n_spare, slots, std::move(memory), low_slots, n_stage, n_stages);
        }
        return 0;
    });
}
