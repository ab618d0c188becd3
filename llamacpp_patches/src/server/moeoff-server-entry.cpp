// The entry: starts and stops llama-server. Its call llama_server(params, 0, nullptr) is the one of llama.cpp's own
// command line: no signal handlers, no router, no download.

#include "moeoff-server-hooks.h"

#include "../../../ggml/src/ggml-cpu/moeoff/moeoff-api.h"
#include "../server-stream.h"

#include "common.h"
#include "llama.h"
#include "log.h"
#include "moeoff/moeoff-templates.h"
#include "ui.h"

#include <clocale>
#include <cstdio>
#include <exception>

int  llama_server(common_params & params, int argc, char ** argv);
void llama_server_terminate();

// llama.cpp takes a graph that was ended for one that has failed.
static void log_unless_it_ends(ggml_log_level level, const char * text, void * user_data) {
    if (level != GGML_LOG_LEVEL_ERROR || !moeoff::server_ends_on_purpose()) {
        common_log_default_callback(level, text, user_data);
    }
}

int moeoff_serve(int argc, char ** argv, const moeoff_server_hooks * hooks) {
    int               result = 1;
    ggml_log_callback log_before;
    void *            log_before_data;
    llama_log_get(&log_before, &log_before_data); // the host's, whose other models say through it why they are refused
    try {
        std::setlocale(LC_NUMERIC, "C");
        common_params params;
        common_init();
        llama_log_set(log_unless_it_ends, nullptr);
        server_stream_session_manager_start();
        if (moeoff::server_parse(argc, argv, params)) {
            // what the buffer needs, whatever arguments and environment say
            auto at = params.tensor_buft_overrides.begin();
            for (const llama_model_tensor_buft_override * o = hooks->overrides; o->pattern != nullptr; o++) {
                at = params.tensor_buft_overrides.insert(at, *o) + 1;
            }
            params.no_extra_bufts     = true;
            params.load_mode          = LLAMA_LOAD_MODE_NONE;
            params.lazy_mode          = LLAMA_LAZY_MODE_OFF;
            params.fit_params         = false;
            params.warmup             = false;
            params.sleep_idle_seconds = -1;
            moeoff::server_attach(hooks);
            common_log_set_console(common_log_main(), hooks->answered != nullptr);
            result = llama_server(params, 0, nullptr);
        } else {
            server_stream_session_manager_stop();
        }
    } catch (const std::exception & e) {
        fprintf(stderr, "llama-server: %s\n", e.what());
    }
    moeoff::server_attach(nullptr);
    moeoff::end_idle_templates();
    llama_log_set(log_before, log_before_data);
    common_log_flush(common_log_main());
    common_log_set_console(common_log_main(), true);
    // so that whoever reads it at the other end of a pipe sees that it has ended
    common_log_set_file(common_log_main(), nullptr);
    return result;
}

void moeoff_isolate_templates(const char * program) { moeoff::isolate_templates(program); }

bool moeoff_serve_has_page(void) {
#ifdef LLAMA_UI_HAS_ASSETS
    return true;
#else
    return false;
#endif
}

void moeoff_serve_stop(void) {
    if (common_log_get_verbosity_thold() <= LOG_LEVEL_ERROR) {
        // what ends on purpose while it loads is no error; the next server sets it anew
        common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT);
    }
    moeoff::end_templates();
    llama_server_terminate();
}

void moeoff_server_prompt_max(int32_t n_tokens) { moeoff::server_set_prompt_max(n_tokens); }

const char * moeoff_server_layout(void) {
    static const std::string text = [] {
        std::string all;
#include "moeoff-server-abi.inc"
        return all;
    }();
    return text.c_str();
}
