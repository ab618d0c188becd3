// Parses the options of llama-server that the host passes.

#include "moeoff-server-hooks.h"

#include "arg.h"
#include "chat.h"
#include "common.h"
#include "moeoff/moeoff-templates.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

// Options come from the host alone: LLAMA_ARG_* in the environment would get past what it checks.
bool moeoff::server_parse(int argc, char ** argv, common_params & params) {
    std::vector<std::pair<std::string, std::string>> hidden;
    for (char ** e = environ; *e != nullptr; e++) {
        const std::string entry = *e;
        const size_t      equal = entry.find('=');
        if (entry.rfind("LLAMA_ARG_", 0) == 0 && equal != std::string::npos) {
            hidden.emplace_back(entry.substr(0, equal), entry.substr(equal + 1));
        }
    }
    for (const auto & [name, value] : hidden) {
        unsetenv(name.c_str());
    }
    const bool parsed = common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SERVER);
    for (const auto & [name, value] : hidden) {
        setenv(name.c_str(), value.c_str(), 1);
    }
    return parsed;
}

static int n_values(const common_arg & option) {
    return option.handler_void || option.handler_bool ? 0 : option.handler_str_str ? 2 : 1;
}

static std::string joined(const std::vector<const char *> & names) {
    std::string out;
    for (const char * name : names) {
        out += std::string(out.empty() ? "" : " ") + name;
    }
    return out;
}

const char * moeoff_server_options(void) {
    static const std::string table = [] {
        common_params params;
        std::string   lines;
        for (const common_arg & option : common_params_parser_init(params, LLAMA_EXAMPLE_SERVER).options) {
            const bool chats = option.examples.count(LLAMA_EXAMPLE_CLI) || option.examples.count(LLAMA_EXAMPLE_COMMON);
            lines += std::to_string(n_values(option)) + "\t" + joined(option.args) + "\t" + joined(option.args_neg)
                     + "\t" + (option.env ? option.env : "") + "\t" + (chats ? "1" : "0") + "\n";
        }
        return lines;
    }();
    return table.c_str();
}

static void set_option(
    const common_arg & option, common_params & params, bool positive, const std::vector<std::string> & values) {
    if (option.handler_void) {
        option.handler_void(params);
    } else if (option.handler_bool) {
        option.handler_bool(params, positive);
    } else if (option.handler_int) {
        option.handler_int(params, std::stoi(values[0]));
    } else if (option.handler_string) {
        option.handler_string(params, values[0]);
    } else if (option.handler_str_str) {
        option.handler_str_str(params, values[0], values[1]);
    }
}

static void check_options(int argc, char ** argv, common_params & params) {
    common_params_context known = common_params_parser_init(params, LLAMA_EXAMPLE_SERVER);
    std::map<std::string, std::pair<const common_arg *, bool>> options;
    for (const common_arg & option : known.options) {
        for (const char * name : option.args) {
            options[name] = { &option, true };
        }
        for (const char * name : option.args_neg) {
            options[name] = { &option, false };
        }
    }
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        std::string       name     = argument;
        if (name.compare(0, 2, "--") == 0) {
            std::replace(name.begin(), name.end(), '_', '-');
        }
        const auto entry = options.find(name);
        if (entry == options.end()) {
            throw std::invalid_argument(argument + ": llama-server has no such option");
        }
        const auto [option, positive] = entry->second;
        std::vector<std::string> values;
        for (int n = n_values(*option); n > 0; n--) {
            if (++i >= argc) {
                throw std::invalid_argument(argument + " needs a value");
            }
            values.push_back(argv[i]);
        }
        if (name == "--log-file" || name == "--log-disable") {
            continue; // these change the log at once, which may be that of a server that runs
        }
        try {
            set_option(*option, params, positive, values);
        } catch (const std::exception & e) {
            std::string all = argument;
            for (const std::string & value : values) {
                all += " " + value;
            }
            throw std::invalid_argument(all + ": llama-server does not take this (" + e.what() + ")");
        }
    }
}

// llama.cpp ends the process over a template that it cannot read.
static void check_template(const common_params & params) {
    if (!params.chat_template.empty() && params.use_jinja && !common_chat_verify_template(params.chat_template, true)) {
        std::string why = "it cannot be read";
        moeoff::begin_template_request();
        try {
            moeoff::summarize_template(params.chat_template);
            why = "it fails with an ordinary conversation";
        } catch (const std::exception & e) {
            why = e.what();
        }
        moeoff::end_idle_templates();
        throw std::invalid_argument("the chat template cannot be used: " + why);
    }
}

bool moeoff_server_check(int argc, char ** argv, char * message, size_t size) {
    try {
        common_params params;
        check_options(argc, argv, params);
        check_template(params);
        return true;
    } catch (const std::exception & e) {
        snprintf(message, size, "%s", e.what());
        return false;
    }
}
