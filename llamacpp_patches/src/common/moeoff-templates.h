// Chat templates are programs that come with a model. A process of its own runs them (moeoff-templates-main.cpp), with
// bounds on time and memory, so that no template can stop or crash the caller.

#pragma once

#include "jinja/caps.h"
#include "jinja/runtime.h"
#include "json.h"

#include <cstdint>
#include <stdexcept>
#include <string>

namespace moeoff {

// A template crashed, took too long, too much memory, or wrote too much; or the program that would run it does not
// start.
struct template_bound_error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// From now on the program at this path runs every template.
void isolate_templates(const std::string & program);
bool templates_isolated();

// The program, where it has nothing to do. The next question starts it again.
void end_idle_templates();

// For a stop of the server, while one has set a charge: whoever waits for a template, or asks for one from now on, gets
// an error at once.
void end_templates();

// The request that is answered on this thread takes so much memory in all; false: there is none, as while a model is
// loaded. Throws where there is not so much. Null: nobody asks. Templates go on from here, if they were ended.
using template_charge = bool (*)(int64_t nbytes);
void charge_templates(template_charge charge);

// On this thread. A template that has taken too long is not run again before the next one.
void begin_template_request();

struct template_summary {
    std::string source; // as the engine keeps it
    jinja::caps caps;
};

// Of the isolated program. Both throw std::runtime_error with the engine's text where the template fails, and
// template_bound_error.
template_summary summarize_template(const std::string & source);
std::string      render_template(const std::string & source, const common_json & input, bool mark_input);

// In this process.
jinja::program parse_template(std::string & source); // source becomes what the engine keeps
std::string    render_template(
    const jinja::program & program, const std::string & source, const common_json & input, bool mark_input);

} // namespace moeoff
