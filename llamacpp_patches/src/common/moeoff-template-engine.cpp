// Calls of llama.cpp's engine for chat templates, shared by both programs.

#include "moeoff-templates.h"

#include "jinja/lexer.h"
#include "jinja/parser.h"

namespace moeoff {

jinja::program parse_template(std::string & source) {
    jinja::lexer lexer;
    auto         found = lexer.tokenize(source);
    source             = found.source;
    return jinja::parse_from_tokens(found);
}

std::string render_template(
    const jinja::program & program, const std::string & source, const common_json & input, bool mark_input) {
    jinja::context ctx(source);
    if (input.contains("preserve_reasoning") && input["preserve_reasoning"].is_boolean()) {
        jinja::caps_apply_preserve_reasoning(ctx, input["preserve_reasoning"].get<bool>());
    }
    if (input.contains("reasoning_effort") && input["reasoning_effort"].is_string()
        && !input["reasoning_effort"].empty()) {
        jinja::caps_apply_reasoning_effort(ctx, input["reasoning_effort"].get<std::string>());
    }
    jinja::global_from_json(ctx, input, mark_input);
    jinja::runtime runtime(ctx);
    return jinja::runtime::gather_string_parts(runtime.execute(program))->as_string().str();
}

} // namespace moeoff
