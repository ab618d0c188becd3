#include "moeoff-expert-map.h"

#include "moeoff-arena.h"

#include <algorithm>

namespace moeoff {

tensor * expert_map::add_tensor(const moeoff_tensor_info & info, bool second_block, store * owner) {
    auto t   = std::make_unique<tensor>();
    t->info  = info;
    t->owner = owner;
    t->types = { info.type };
    // llama.cpp calls the MoE block twice in a layer for chunk experts ("chexps"), with a gate node of its own
    gate * g = nullptr;
    for (auto & c : gates) {
        if (c->layer == info.layer && c->second_block == second_block) {
            g = c.get();
        }
    }
    if (!g) {
        gates.push_back(std::make_unique<gate>());
        g               = gates.back().get();
        g->owner        = owner;
        g->index        = n_gates() - 1;
        g->layer        = info.layer;
        g->n_expert     = (int32_t) info.ne[2];
        g->second_block = second_block;
    }
    t->info.gate            = g->index;
    g->tensors[info.matrix] = n_tensors();
    max_experts             = std::max(max_experts, g->n_expert);
    for (auto & lists : sources) {
        lists.emplace_back();
    }
    tensors.push_back(std::move(t));
    return tensors.back().get();
}

bool expert_map::set_sources(
    int32_t i, version v, const moeoff_source * src, int32_t n, const files * in, std::string & error) {
    if (i < 0 || i >= n_tensors() || n != tensors[i]->info.ne[2]) {
        error = "no tensor " + std::to_string(i) + " with " + std::to_string(n) + " experts";
        return false;
    }
    tensor & t = *tensors[i];
    for (int32_t e = 0; e < n; e++) {
        if (src[e].type < 0) {
            continue;
        }
        if ((in && (src[e].file < 0 || src[e].file >= in->count())) || src[e].nbytes == 0) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " has no file or no bytes";
            return false;
        }
        const uint64_t expected = size_of ? size_of(src[e].type, t.info.ne) : src[e].nbytes;
        if (src[e].nbytes != expected) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " has " + std::to_string(src[e].nbytes)
                    + " bytes, and " + std::to_string(t.info.ne[1]) + " rows of " + std::to_string(t.info.ne[0])
                    + " values of type " + std::to_string(src[e].type)
                    + (expected ? " take " + std::to_string(expected) : " do not exist");
            return false;
        }
        const uint64_t size = in ? in->size(src[e].file) : UINT64_MAX;
        if (src[e].nbytes > size || src[e].offset > size - src[e].nbytes) {
            error = std::string(t.info.name) + ": expert " + std::to_string(e) + " lies beyond the end of its file";
            return false;
        }
    }
    sources[v][i].assign(src, src + n);
    t.types.clear();
    t.max_nbytes = 0;
    for (const auto & lists : sources) {
        for (const auto & s : lists[i]) {
            t.max_nbytes = std::max(t.max_nbytes, s.type < 0 ? 0 : s.nbytes);
            if (s.type >= 0 && std::find(t.types.begin(), t.types.end(), s.type) == t.types.end()) {
                t.types.push_back(s.type);
            }
        }
    }
    if (t.types.empty()) {
        t.types.push_back(t.info.type); // all "none"; the kernel still sizes its work area by a type
    }
    return true;
}

bool expert_map::is_complete(std::string & error) const {
    for (int32_t i = 0; i < n_tensors(); i++) {
        for (const version v : { HIGH, LOW }) {
            if (sources[v][i].empty() && (v == HIGH || has_low())) {
                error = std::string(tensors[i]->info.name) + ": no " + (v == LOW ? "low " : "") + "sources";
                return false;
            }
        }
    }
    return true;
}

const moeoff_source * expert_map::source_of(const gate & g, int32_t matrix, int32_t expert, version v) const {
    const int32_t i = g.tensors[(size_t) matrix];
    return i >= 0 && (size_t) expert < sources[v][(size_t) i].size() ? &sources[v][(size_t) i][(size_t) expert]
                                                                     : nullptr;
}

uint64_t expert_map::expert_bytes(const gate & g, int32_t expert, version v) const {
    uint64_t sum = 0;
    for (int32_t matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
        const moeoff_source * s = source_of(g, matrix, expert, v);
        sum += s && s->type >= 0 ? s->nbytes : 0;
    }
    return sum;
}

uint64_t expert_map::slot_bytes(const gate & g, int32_t expert, version v) const {
    uint64_t sum = 0;
    for (int32_t matrix = 0; matrix < MOEOFF_N_MATRIX; matrix++) {
        const moeoff_source * s = source_of(g, matrix, expert, v);
        sum += s && s->type >= 0 ? arena::slot_bytes(s->nbytes) : 0;
    }
    return arena::whole_pages(sum);
}

uint64_t expert_map::arena_full(version v) const {
    uint64_t sum = 0;
    for (const auto & g : gates) {
        for (int32_t e = 0; e < g->n_expert; e++) {
            sum += slot_bytes(*g, e, v);
        }
    }
    return sum;
}

uint64_t expert_map::arena_floor(version v) const {
    uint64_t largest = 0;
    for (const auto & g : gates) {
        for (int32_t e = 0; e < g->n_expert; e++) {
            largest = std::max(largest, slot_bytes(*g, e, v));
        }
    }
    return 2 * largest; // one expert computes while the next arrives
}

} // namespace moeoff
