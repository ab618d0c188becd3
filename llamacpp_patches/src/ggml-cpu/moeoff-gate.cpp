#include "moeoff-gate.h"

#include "moeoff-buffer-type.h"

#include "ggml.h"

#include <new>

bool moeoff_on_disk(const ggml_tensor * tensor) { return moeoff::is_reserved(tensor); }

void * moeoff_gate_of(const ggml_tensor * tensor) {
    const moeoff::tensor * t = moeoff::reserved_tensor(tensor);
    return t ? &t->owner->experts().gate_of(*t) : nullptr;
}

bool moeoff_gate_wants_input(const void * gate) {
    return ((const moeoff::gate *) gate)->owner->get_flags() & MOEOFF_FLAG_GATE_INPUT;
}

bool moeoff_gate_wants_logits(const void * gate) {
    return ((const moeoff::gate *) gate)->owner->get_flags() & MOEOFF_FLAG_GATE_LOGITS;
}

static void post_event(moeoff::gate & gate, const ggml_tensor * ids, const ggml_tensor * weights, const ggml_tensor * input, const ggml_tensor * logits) {
    moeoff_gate_event    event   = {};
    moeoff::gate_strides strides = { ids->nb[1], weights->nb[2], weights->nb[1] };
    event.gate     = gate.index;
    event.layer    = gate.layer;
    event.n_used   = (int32_t) ids->ne[0];
    event.n_tokens = (int32_t) ids->ne[1];
    event.ids      = (const int32_t *) ids->data;
    event.weights  = (const float *) weights->data;
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
            gate.owner->gate_event(gate, event, strides);
        } catch (const std::bad_alloc &) { // ggml is C
            gate.owner->fail("out of memory");
        }
    }
}

void moeoff_gate_node(ggml_tensor * dst, int ith, int, void * gate) {
    if (ith == 0) { // ggml runs a custom op on every thread
        post_event(*(moeoff::gate *) gate, dst->src[0], dst->src[1], dst->src[2], nullptr);
    }
}

void moeoff_gate_node_with_logits(ggml_tensor * dst, int ith, int, void * gate) {
    if (ith == 0) {
        const bool has_input = dst->src[3] != nullptr;
        post_event(*(moeoff::gate *) gate, dst->src[0], dst->src[1], has_input ? dst->src[2] : nullptr, dst->src[has_input ? 3 : 2]);
    }
}
