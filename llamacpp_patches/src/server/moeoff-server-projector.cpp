// The memory that a projector will take, from its headers: mtmd plans its buffers before anything is loaded.

#include "moeoff-server-hooks.h"

#include "clip.h"
#include "common.h"
#include "mtmd.h"

#include "ggml-backend.h"

#include <cstdio>
#include <exception>
#include <string>

static void keep_error(ggml_log_level level, const char * text, void * to) {
    std::string & first = *(std::string *) to;
    if (level == GGML_LOG_LEVEL_ERROR && first.empty()) {
        first = text;
    }
}

static uint64_t host_bytes(const clip_ctx * ctx) {
    uint64_t sum = 0;
    if (ctx) {
        for (const auto & [device, size] : clip_get_mem_usage(ctx)) {
            sum += ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ? size : 0;
        }
    }
    return sum;
}

// with or without the buffers that it computes with. Returns the numbers of one embedding; 0: it cannot be loaded.
static int32_t plan(const common_params & params, bool compute, uint64_t & nbytes) {
    clip_context_params clip = {};
    clip.use_gpu             = params.mmproj_use_gpu;
    clip.device              = params.mmproj_device;
    clip.flash_attn_type     = params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_ENABLED ? CLIP_FLASH_ATTN_TYPE_ENABLED
                                                                                       : CLIP_FLASH_ATTN_TYPE_DISABLED;
    clip.image_min_tokens    = params.image_min_tokens;
    clip.image_max_tokens    = params.image_max_tokens;
    clip.warmup              = compute;
    clip.no_alloc            = true;
    const clip_init_result made = clip_init(params.mmproj.path.c_str(), clip);
    const clip_ctx *       any  = made.ctx_v ? made.ctx_v : made.ctx_a;
    nbytes                      = host_bytes(made.ctx_v) + host_bytes(made.ctx_a) + host_bytes(made.ctx_gen_a);
    const int32_t n_embd        = any ? clip_n_mmproj_embd(any) : 0;
    clip_free(made.ctx_v);
    clip_free(made.ctx_a);
    clip_free(made.ctx_gen_a);
    return n_embd;
}

int32_t moeoff_projector_memory(int argc, char ** argv, uint64_t * bytes, char * message, size_t size) {
    std::string error;
    int32_t     n_embd = 0;
    mtmd_log_set(keep_error, &error);
    try {
        const moeoff::server_guard guard;
        common_params              params;
        if (moeoff::server_parse(argc, argv, params)) {
            uint64_t all = 0;
            if (plan(params, false, bytes[0]) > 0) {
                n_embd   = plan(params, true, all);
                bytes[1] = all - bytes[0];
            }
        }
    } catch (const std::exception & e) {
        error = e.what();
    }
    mtmd_log_set(nullptr, nullptr);
    snprintf(message, size, "%s", error.c_str());
    return n_embd;
}
