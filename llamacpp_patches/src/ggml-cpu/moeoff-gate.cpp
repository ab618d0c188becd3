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

void moeoff_gate_node(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return; // ggml runs a custom op on every thread
    }
    moeoff::gate &      gate    = *(moeoff::gate *) userdata;
    const ggml_tensor * ids     = dst->src[0];
    const ggml_tensor * weights = dst->src[1];
    const ggml_tensor * input   = dst->src[2];

    moeoff_gate_event event = {};
    event.gate       = gate.index;
    event.layer      = gate.layer;
    event.n_used     = (int32_t) ids->ne[0];
    event.n_tokens   = (int32_t) ids->ne[1];
    event.n_embd     = input ? (int32_t) input->ne[0] : 0;
    event.ids        = (const int32_t *) ids->data;
    event.weights    = (const float *) weights->data;
    event.gate_input = input ? (const float *) input->data : nullptr;
    if (gate.owner->started() && event.n_tokens > 0) {
        try {
            gate.owner->gate_event(gate, event, ids->nb[1], weights->nb[2], weights->nb[1], input ? input->nb[1] : 0);
        } catch (const std::bad_alloc &) { // ggml is C
            gate.owner->fail("out of memory");
        }
    }
}
