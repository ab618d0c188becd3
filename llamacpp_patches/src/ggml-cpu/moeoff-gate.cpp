#include "moeoff-gate.h"

#include "moeoff-buffer-type.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstring>
#include <new>

bool moeoff_stays_on_disk(const ggml_tensor * tensor) {
    if (moeoff::is_reserved(tensor)) {
        return true;
    }
    // without data it is mapped
    if (moeoff::is_loading() && tensor->buffer && tensor->data && ggml_backend_buffer_is_host(tensor->buffer)) {
        moeoff::adopt_dense(tensor->buffer);
    }
    return false;
}

void moeoff_adopt_dense(ggml_backend_buffer_t buffer) { moeoff::adopt_dense(buffer); }

void * moeoff_gate_of(const ggml_tensor * tensor) {
    const moeoff::tensor * t = moeoff::reserved_tensor(tensor);
    return t ? &t->owner->experts().gate_of(*t) : nullptr;
}

uint32_t moeoff_gate_flags(const void * gate) { return ((const moeoff::gate *) gate)->owner->get_flags(); }
void     moeoff_gate_set_gating(const void * gate, int32_t gating) {
    ((const moeoff::gate *) gate)->owner->set_gating(gating);
}

int moeoff_gate_device_mode(const void * gate, const void * user, int64_t n_used, int64_t n_tokens) {
    const auto & g = *(const moeoff::gate *) gate;
    return g.owner->device_mode(g, user, n_used, n_tokens);
}

bool moeoff_gate_uploads_all(const void * gate) { return ((const moeoff::gate *) gate)->owner->device_uploads_all(); }

bool moeoff_gate_is_reordered(const void * gate) { return ((const moeoff::gate *) gate)->owner->device_is_reordered(); }

int moeoff_gate_n_waves(const void * gate, int version, int64_t n_used, int64_t n_tokens) {
    const auto & g = *(const moeoff::gate *) gate;
    return g.owner->device_waves(g, (moeoff::version) version, n_used, n_tokens);
}

ggml_tensor * moeoff_device_slots_of(const ggml_tensor * tensor, int64_t n_used, int64_t n_tokens) {
    const moeoff::tensor *      t     = moeoff::reserved_tensor(tensor);
    const moeoff::slot_memory * slots = t ? t->owner->device_memory() : nullptr;
    if (!slots) {
        return nullptr;
    }
    const bool is_staged = t->owner->is_staged(t->owner->experts().gate_of(*t), n_used, n_tokens);
    return (ggml_tensor *) slots->tensor(t->info.gate, is_staged ? moeoff::STAGE : moeoff::HIGH_SLOTS, t->info.matrix);
}

ggml_tensor * moeoff_device_low_slots_of(const void * gate, const ggml_tensor * slots) {
    const auto & g      = *(const moeoff::gate *) gate;
    const auto * memory = g.owner->device_memory();
    int32_t      matrix = 0;
    while (memory->tensor(g.index, moeoff::HIGH_SLOTS, matrix) != slots
           && memory->tensor(g.index, moeoff::STAGE, matrix) != slots) {
        matrix++;
    }
    return (ggml_tensor *) memory->tensor(g.index, moeoff::LOW_SLOTS, matrix);
}

void moeoff_gate_set_sched(const void * gate, ggml_backend_sched_t sched) {
    const auto & g = *(const moeoff::gate *) gate;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        // it takes its own device's
        g.owner->device_memory()->set_computing(g.index, ggml_backend_sched_get_backend(sched, i));
    }
}

// a plane of a node's ids: the k-th slot of zeros for each token's k-th expert
static int32_t * with_zeros(const ggml_tensor * dst, int plane, const moeoff::gate & gate, moeoff::version v) {
    int32_t * const out     = (int32_t *) ((char *) dst->data + plane * dst->nb[2]);
    const int32_t   n_slots = gate.owner->n_device_slots(gate, v, dst->ne[0], dst->ne[1]);
    for (int64_t i = 0; i < dst->ne[0] * dst->ne[1]; i++) {
        out[i] = n_slots + (int32_t) (i % dst->ne[0]);
    }
    return out;
}

// where the device's ids and those of the CPU go; before they are known, all is the CPU's
static moeoff::device_ids device_ids_of(const ggml_tensor * dst, const moeoff::gate & gate, const ggml_tensor * ids) {
    int32_t * const host = (int32_t *) ((char *) dst->data + dst->nb[2]);
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        memcpy(host + t * ids->ne[0], (const char *) ids->data + t * ids->nb[1], (size_t) ids->ne[0] * sizeof(int32_t));
    }
    return { with_zeros(dst, 0, gate, moeoff::HIGH), host,
        dst->ne[2] == 3 ? with_zeros(dst, 2, gate, moeoff::LOW) : nullptr };
}

static void post_event(ggml_tensor * dst, moeoff::gate & gate) {
    const ggml_tensor *      ids        = dst->src[0];
    const ggml_tensor *      weights    = dst->src[1];
    const ggml_tensor *      input      = dst->src[2];
    const ggml_tensor *      logits     = dst->src[3];
    const bool               has_device = dst->ne[2] > 1;
    const moeoff::device_ids out        = has_device ? device_ids_of(dst, gate, ids) : moeoff::device_ids {};
    moeoff_gate_event        event      = {};
    moeoff::gate_strides     strides    = { ids->nb[1], weights->nb[2], weights->nb[1] };
    event.gate                          = gate.index;
    event.layer                         = gate.layer;
    event.n_used                        = (int32_t) ids->ne[0];
    event.n_tokens                      = (int32_t) ids->ne[1];
    event.ids                           = (const int32_t *) ids->data;
    event.weights                       = (const float *) weights->data;
    if (input) {
        event.n_embd     = (int32_t) input->ne[0];
        event.gate_input = (const float *) input->data;
        strides.input    = input->nb[1];
    }
    if (logits) {
        event.n_expert = (int32_t) logits->ne[0];
        event.logits   = (const float *) logits->data;
        strides.logits = logits->nb[1];
    }
    if (gate.owner->started() && event.n_tokens > 0) {
        try {
            gate.owner->gate_event(gate, event, strides, has_device ? &out : nullptr);
        } catch (const std::bad_alloc &) { // ggml is C
            gate.owner->fail(moeoff::graph_of_this_thread(), "out of memory");
        }
    }
}

void moeoff_gate_node(ggml_tensor * dst, int ith, int, void * gate) {
    if (ith == 0) { // ggml runs a custom op on every thread
        post_event(dst, *(moeoff::gate *) gate);
    }
}

void moeoff_wave_node(ggml_tensor * dst, int ith, int, void * of) {
    if (ith != 0) {
        return;
    }
    moeoff::gate &      gate   = *(moeoff::gate *) of;
    const ggml_tensor * ids    = dst->src[0];
    const int32_t       n_used = (int32_t) ids->ne[0], n_tokens = (int32_t) ids->ne[1];
    try {
        gate.owner->next_wave(gate, (const int32_t *) ids->data, ids->nb[1], n_tokens, n_used, (int32_t *) dst->data);
    } catch (const std::bad_alloc &) { // ggml is C
        for (int plane = 0; plane < dst->ne[2]; plane++) {
            with_zeros(dst, plane, gate, plane == 0 ? moeoff::HIGH : moeoff::LOW);
        }
        gate.owner->fail(moeoff::graph_of_this_thread(), "out of memory");
    }
}
