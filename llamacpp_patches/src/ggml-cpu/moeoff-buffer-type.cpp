#include "moeoff-attention.h"
#include "moeoff-buffer-type.h"
#include "moeoff-row-kernels.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "traits.h"

#include <cstdio>
#include <cstring>
#include <new>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE
#    define MAP_NORESERVE 0
#endif

namespace moeoff {

// the expert buffer that models loaded by this thread belong to; see moeoff_load_begin
thread_local std::shared_ptr<store> loading;

// context of a ggml buffer
struct reservation {
    std::shared_ptr<store> owner;
    void *                 base  = nullptr;
    size_t                 bytes = 0;
};

bool is_reserved(const ggml_tensor * t) {
    // size 0: the loader only asks which ops the type supports. extra: a view of a reserved tensor cannot be computed
    // with
    return t && t->buffer && t->buffer->buft == ggml_backend_cpu_moeoff_buffer_type() && t->buffer->size != 0
           && t->extra;
}

store & reserved_store(const ggml_tensor * t) { return *((const reservation *) t->buffer->context)->owner; }

const tensor * reserved_tensor(const ggml_tensor * t) {
    return is_reserved(t) && !reserved_row_table(t) ? (const tensor *) t->extra : nullptr;
}

row_table * reserved_row_table(const ggml_tensor * t) {
    if (is_reserved(t)) {
        for (const auto & rows : reserved_store(t).row_tables()) {
            if (rows.get() == t->extra) {
                return rows.get();
            }
        }
    }
    return nullptr;
}

// Dense weights are read whole for every token, and are many times what a TLB of small pages reaches. All of a buffer
// is advised before its first tensor is read, as huge pages are only made where nothing lies yet; advice given again is
// free.
static void advise_huge_pages(ggml_backend_buffer_t buffer) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t base  = (uintptr_t) ggml_backend_buffer_get_base(buffer);
    const uintptr_t begin = (base + page - 1) / page * page;
    const uintptr_t end   = (base + ggml_backend_buffer_get_size(buffer)) / page * page;
    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_HUGEPAGE); // a kernel without them refuses, and nothing is lost
    }
#else
    (void) buffer;
#endif
}

// The mark of an adopted buffer: ggml calls it, where there is one, for buffers of activations only. It goes with the
// buffer, and a model that was loaded without an expert buffer has none, so that it is computed as the release does.
static void dense_reset(ggml_backend_buffer_t) {}

void adopt_dense(ggml_backend_buffer_t buffer) {
    advise_huge_pages(buffer);
    if (!buffer->iface.reset) {
        buffer->iface.reset = dense_reset;
    }
}

bool is_loading() { return loading != nullptr; }

bool is_dense(const ggml_tensor * t) { return t->buffer && t->buffer->iface.reset == dense_reset; }

// --- buffer ---

static void buffer_free(ggml_backend_buffer_t buffer) {
    auto * r = (reservation *) buffer->context;
    munmap(r->base, r->bytes);
    delete r;
}

static void * buffer_get_base(ggml_backend_buffer_t buffer) { return ((reservation *) buffer->context)->base; }

// "blk.<layer>.ffn_<matrix>_[ch]exps.weight"; false if the name is another one
static bool parse_name(const char * name, moeoff_tensor_info & info, bool & second_block) {
    int  layer    = 0;
    char rest[64] = "";
    if (sscanf(name, "blk.%d.ffn_%63s", &layer, rest) != 2) {
        return false;
    }
    static const struct {
        const char * prefix;
        int32_t      matrix;
    } matrices[] = {
        { "gate_up_", MOEOFF_MATRIX_GATE_UP }, // before its prefix "gate_"
        { "gate_", MOEOFF_MATRIX_GATE },
        { "up_", MOEOFF_MATRIX_UP },
        { "down_", MOEOFF_MATRIX_DOWN },
    };
    for (const auto & m : matrices) {
        const size_t n = strlen(m.prefix);
        if (strncmp(rest, m.prefix, n) == 0) {
            second_block = strcmp(rest + n, "chexps.weight") == 0;
            info.layer   = layer;
            info.matrix  = m.matrix;
            return second_block || strcmp(rest + n, "exps.weight") == 0;
        }
    }
    return false;
}

static ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t) {
    if (t->view_src) {
        return GGML_STATUS_SUCCESS;
    }
    moeoff_tensor_info info         = {};
    bool               second_block = false;
    const bool         is_table     = !parse_name(t->name, info, second_block);
    store &            owner        = *((reservation *) buffer->context)->owner;
    if ((is_table && !ggml_is_matrix(t)) || strlen(t->name) >= sizeof(info.name)) {
        GGML_LOG_ERROR("%s: %s is neither a tensor of routed experts nor a table\n", __func__, t->name);
        return GGML_STATUS_FAILED;
    }
    strcpy(info.name, t->name);
    info.type   = t->type;
    info.ne[0]  = t->ne[0];
    info.ne[1]  = t->ne[1];
    info.ne[2]  = t->ne[2];
    info.nbytes = t->nb[2];
    if (is_table) {
        info.gate = info.layer = info.matrix = -1;
        info.nbytes                          = t->nb[1];
    }
    try {
        t->extra = is_table ? (void *) owner.add_row_table(info) : (void *) owner.add_tensor(info, second_block);
    } catch (const std::bad_alloc &) { // ggml is C
        return GGML_STATUS_ALLOC_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

// Nothing may touch the bytes: they are not there. The loader skips these tensors, the graph reads them by MUL_MAT_ID
// and GET_ROWS only.
static void buffer_no_access(ggml_backend_buffer_t, const ggml_tensor * t, const char * what) {
    GGML_ABORT("moeoff: %s of %s, which is on disk\n", what, t->name);
}

static void buffer_set_tensor(ggml_backend_buffer_t b, ggml_tensor * t, const void *, size_t, size_t) {
    buffer_no_access(b, t, "write");
}
static void buffer_get_tensor(ggml_backend_buffer_t b, const ggml_tensor * t, void *, size_t, size_t) {
    buffer_no_access(b, t, "read");
}
static void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

static const ggml_backend_buffer_i buffer_iface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ nullptr,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

// --- buffer type ---

static const char * buft_get_name(ggml_backend_buffer_type_t) { return "CPU_MOEOFF"; }
static size_t       buft_get_alignment(ggml_backend_buffer_type_t) { return 64; }

static ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (!loading) {
        GGML_LOG_ERROR("%s: no expert buffer is being loaded on this thread\n", __func__);
        return nullptr;
    }
    void * base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        GGML_LOG_ERROR("%s: cannot reserve %zu bytes of address space\n", __func__, size);
        return nullptr;
    }
    auto * r = new (std::nothrow) reservation { loading, base, size };
    if (!r) {
        munmap(base, size);
        return nullptr;
    }
    return ggml_backend_buffer_init(buft, buffer_iface, r, size);
}

// what is computed with a reserved tensor
static bool is_product(const ggml_tensor * op) { return op->op == GGML_OP_MUL_MAT_ID && reserved_tensor(op->src[0]); }
static bool is_lookup(const ggml_tensor * op) { return op->op == GGML_OP_GET_ROWS && reserved_row_table(op->src[0]); }
static bool is_row_copy(const ggml_tensor * op) {
    return op->op == GGML_OP_CPY && op->src[0]->view_src && reserved_row_table(op->src[0]->view_src);
}

class traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = op->op == GGML_OP_MUL_MAT_ID ? mul_mat_id_work_size(n_threads, op) : get_rows_work_size(n_threads, op);
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor * weights = op->src[0]->view_src ? op->src[0]->view_src : op->src[0];
        if (reserved_store(weights).is_copy()) {
            if (params->ith == 0) {
                memset(op->data, 0, ggml_nbytes(op)); // the graph ends
            }
        } else if (op->op == GGML_OP_GET_ROWS) {
            get_rows(params, op);
        } else if (op->op == GGML_OP_CPY) {
            copy_row(params, op);
        } else {
            mul_mat_id(params, op);
        }
        return true;
    }
};

class dense_traits : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; } // as ggml-cpu plans it
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        dense_product(params, op);
        return true;
    }
};

class attention_traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = attention_work_size(n_threads, op);
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override { return attention(params, op); }
};

class extra_buffer_type : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        return ((is_product(op) && op->src[1]->type == GGML_TYPE_F32)
                   || (is_lookup(op) && op->src[1]->type == GGML_TYPE_I32) || is_row_copy(op))
               && (!op->src[1]->buffer || ggml_backend_buft_is_host(op->src[1]->buffer->buft));
    }
    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        static traits           reserved;
        static dense_traits     dense;
        static attention_traits attention;
        switch (op->op) {
            case GGML_OP_MUL_MAT: return is_dense_product(op) ? &dense : nullptr;
            case GGML_OP_FLASH_ATTN_EXT: return is_attention(op) ? &attention : nullptr;
            default: return is_product(op) || is_lookup(op) || is_row_copy(op) ? &reserved : nullptr;
        }
    }
};

} // namespace moeoff

ggml_backend_buffer_type_t ggml_backend_cpu_moeoff_buffer_type(void) {
    static ggml_backend_buffer_type type = {
        /* .iface = */ {
            /* .get_name       = */ moeoff::buft_get_name,
            /* .alloc_buffer   = */ moeoff::buft_alloc_buffer,
            /* .get_alignment  = */ moeoff::buft_get_alignment,
            /* .get_max_size   = */ nullptr,
            /* .get_alloc_size = */ nullptr,
            /* .is_host        = */ nullptr, // not host: op offload, mlock and LoRA leave it alone
        },
        /* .device  = */ ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        /* .context = */ new moeoff::extra_buffer_type(),
    };
    return &type;
}

// --- moeoff.h: loading ---

void * moeoff_buffer_type(void) { return ggml_backend_cpu_moeoff_buffer_type(); }

int moeoff_load_begin(moeoff_expert_buffer * eb) {
    eb->store->set_type_size([](int32_t type, const int64_t * ne) -> uint64_t {
        if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size((ggml_type) type) <= 0
            || ne[0] % ggml_blck_size((ggml_type) type) != 0) {
            return 0;
        }
        return (uint64_t) ggml_row_size((ggml_type) type, ne[0]) * (uint64_t) ne[1];
    });
    eb->store->set_router_product(moeoff_row_products);
    moeoff::loading = std::shared_ptr<moeoff::store>(eb->self, eb->store.get());
    return 0;
}

void moeoff_load_end(moeoff_expert_buffer *) { moeoff::loading.reset(); }
