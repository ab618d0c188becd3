#include "moeoff-server-ollama-answer.h"

#include <chrono>
#include <cmath>
#include <ctime>

namespace moeoff {

std::string ollama_time_text(int64_t ns) {
    const time_t seconds = ns / 1000000000;
    struct tm    parts;
    gmtime_r(&seconds, &parts);
    char         text[64];
    const size_t n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text + n, sizeof(text) - n, ".%09lldZ", (long long) (ns % 1000000000));
    return text;
}

std::string ollama_error_text(const json & error) {
    const json  of   = error.is_object() ? json_value(error, "error", error) : error;
    std::string text = of.is_string() ? of.get<std::string>() : json_value(of, "message", safe_json_to_str(of));
    return safe_json_to_str(json{{"error", text}});
}

//
// ollama_answer
//

ollama_answer::piece ollama_answer::read(const json & event) {
    timings = json_value(event, "timings", timings);
    usage   = json_value(event, "moeoff", usage);
    piece out;
    if (!event.contains("choices")) {
        out.content = json_value(event, "content", std::string());
        if (json_value(event, "stop", false)) {
            done_reason = json_value(event, "stop_type", std::string()) == "limit" ? "length" : "stop";
        }
        return out;
    }
    for (const json & choice : event.at("choices")) {
        const json & said = choice.at(choice.contains("delta") ? "delta" : "message");
        out.content += json_value(said, "content", std::string());
        out.thinking += json_value(said, "reasoning_content", std::string());
        for (const json & part : json_value(said, "tool_calls", json::array())) {
            add_call(part, out.tool_calls);
        }
        const std::string reason = json_value(choice, "finish_reason", std::string());
        if (!reason.empty()) {
            end_call(out.tool_calls);
            done_reason = reason == "length" ? "length" : "stop";
        }
    }
    return out;
}

// A part without an index is a whole call.
void ollama_answer::add_call(const json & part, json & tool_calls) {
    const int index = json_value(part, "index", -1);
    if (call.is_null() || index < 0 || index != json_value(call, "index", -1)) {
        end_call(tool_calls);
        call = json{{"index", index}, {"id", json_value(part, "id", std::string())}, {"name", ""}, {"arguments", ""}};
    }
    const json function = json_value(part, "function", json::object());
    for (const char * key : {"name", "arguments"}) {
        call[key] = call.at(key).get<std::string>() + json_value(function, key, std::string());
    }
}

void ollama_answer::end_call(json & tool_calls) {
    if (call.is_null()) {
        return;
    }
    const std::string text      = call.at("arguments");
    json              arguments = json::parse_no_throw(text);
    if (!arguments.is_object()) { // clients count on one
        arguments = text.empty() ? json::object() : json{{"value", text}};
    }
    const int index = json_value(call, "index", -1);
    tool_calls.push_back({
        {"id",       call.at("id")},
        {"function", json{{"index", index < 0 ? (int) tool_calls.size() : index}, {"name", call.at("name")}, {"arguments", arguments}}},
    });
    call = nullptr;
}

json ollama_answer::line(const piece & said) const {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    json       out = {{"model", model}, {"created_at", ollama_time_text(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count())}};
    json       message = json::object();
    if (chat) {
        message["role"] = "assistant";
    }
    message[chat ? "content" : "response"] = said.content;
    if (!said.thinking.empty()) {
        message["thinking"] = said.thinking;
    }
    if (!said.tool_calls.empty()) {
        message["tool_calls"] = said.tool_calls;
    }
    if (chat) {
        out["message"] = message;
    } else {
        for (const auto & item : message.items()) {
            out[item.key()] = item.value();
        }
    }
    out["done"] = false;
    return out;
}

json ollama_answer::last_line(const piece & said) const {
    const auto ns  = [&](const char * name) { return (int64_t) std::llround(json_value(timings, name, 0.0) * 1e6); };
    json       out = line(said);

    out["done"]                 = true;
    out["done_reason"]          = done_reason;
    out["total_duration"]       = (ggml_time_us() - t_start) * 1000;
    out["load_duration"]        = 0;
    out["prompt_eval_count"]    = json_value(timings, "cache_n", 0) + json_value(timings, "prompt_n", 0);
    out["prompt_eval_duration"] = ns("prompt_ms");
    out["eval_count"]           = json_value(timings, "predicted_n", 0);
    out["eval_duration"]        = ns("predicted_ms");
    if (!usage.is_null()) {
        out["moeoff"] = usage;
    }
    return out;
}

json ollama_answer::loaded_line() const {
    json out           = line({});
    out["done"]        = true;
    out["done_reason"] = "load";
    return out;
}

//
// ollama_res
//

void ollama_res::start(const server_http_context::handler_t & route) {
    inner = route(req);
    if (inner->is_stream()) {
        content_type = "application/x-ndjson";
        next         = [this](std::string & out) { return next_lines(out); };
    } else if (!inner->data.empty()) { // it is where the client has gone
        const json whole = json::parse(inner->data);
        status           = inner->status;
        data             = status == 200 ? safe_json_to_str(answer.last_line(answer.read(whole))) : ollama_error_text(whole);
    }
}

// What the route sends are server-sent events; a call may bring several, or a part of one.
bool ollama_res::next_lines(std::string & out) {
    try {
        std::string chunk;
        const bool  more = inner->next(chunk);
        received += chunk;
        bool   failed = false;
        size_t begin  = 0;
        for (size_t end; (end = received.find('\n', begin)) != std::string::npos; begin = end + 1) {
            if (received.compare(begin, 7, "data: {") != 0) {
                continue; // [DONE], a comment, an empty line
            }
            const json event = json::parse(received.substr(begin + 6, end - begin - 6));
            if (event.contains("error")) {
                failed = true;
                out += ollama_error_text(event) + "\n";
                continue;
            }
            const auto said = answer.read(event);
            if (!said.empty()) {
                out += safe_json_to_str(answer.line(said)) + "\n";
            }
        }
        received.erase(0, begin);
        if (!more && !failed && answer.is_done()) {
            out += safe_json_to_str(answer.last_line({})) + "\n";
        }
        return more;
    } catch (const std::exception & e) { // nobody is above to whom it could go
        out += ollama_error_text(json(std::string(e.what()))) + "\n";
        return false;
    }
}

} // namespace moeoff
