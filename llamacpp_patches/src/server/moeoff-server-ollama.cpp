// Ollama's API: each request becomes one of llama-server's own routes, and its answer becomes Ollama's.
//
// There is one model, whatever name a request gives; it is loaded, and stays so: keep_alive, num_ctx and the like
// change nothing. Knows about the model what llama-server's routes and the loaded metadata tell.

#include "moeoff-server-pages.h"

#include "moeoff-server-hooks.h"

#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <map>

namespace moeoff {

using handler_t = server_http_context::handler_t;

// Clients compare it with the release that brought what they want to use. What is here, with levels of thinking and
// capabilities, is what 0.12 has.
static const char * const OLLAMA_VERSION = "0.12.0";

//
// answers
//

static std::string text_of(const json & object, const char * key) { // empty: there is none
    return json_value(object, key, std::string());
}

static std::string time_text(int64_t ns) { // since 1970, as RFC 3339 writes it
    const time_t seconds = ns / 1000000000;
    struct tm    parts;
    gmtime_r(&seconds, &parts);
    char         text[64];
    const size_t n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text + n, sizeof(text) - n, ".%09lldZ", (long long) (ns % 1000000000));
    return text;
}

// {"error": text}, of a text or of an error of llama-server's.
static json error_of(const json & error) {
    const json of = error.is_object() ? json_value(error, "error", error) : error;
    return { { "error", of.is_string() ? of.get<std::string>() : json_value(of, "message", safe_json_to_str(of)) } };
}

static server_http_res_ptr answer_with(const json & data, int status = 200) {
    auto res    = std::make_unique<server_http_res>();
    res->status = status;
    res->data   = safe_json_to_str(data);
    return res;
}

namespace {

// One answer: llama-server's events, or its one object, in; Ollama's out. Both forms of llama-server's are read: that
// of /v1/chat/completions and that of /completion. It holds the request that was made of the client's: the route may
// look at it until the end.
class ollama_res : public server_http_res {
  public:
    ollama_res(server_http_req req, const std::string & model, bool chat)
        : req(std::move(req)), model(model), chat(chat) {}

    void start(const handler_t & route);
    void on_complete() override { inner->on_complete(); }

    json line(const json & message) const;

  private:
    struct tool_call {
        int         index; // below 0: it came whole
        std::string id, name, arguments;
    };

    json read(const json & event); // the message that it brings
    void add_call(const json & part, json & message);
    void end_call(json & message);
    json last_line(const json & message) const;
    bool next_lines(std::string & out);

    const server_http_req    req;
    const std::string        model;
    const bool               chat; // and not /api/generate
    const int64_t            t_start = ggml_time_us();
    server_http_res_ptr      inner;
    std::string              received; // of a stream: a line that is not complete yet
    std::string              done_reason;
    json                     timings = json::object();
    json                     usage   = nullptr; // of the expert buffer
    std::optional<tool_call> call; // one that has begun: a stream brings its arguments in parts of a text
};

json ollama_res::read(const json & event) {
    timings = json_value(event, "timings", timings);
    usage   = json_value(event, "moeoff", usage);

    json       message = json::object();
    const auto add     = [&](const char * key, const std::string & text) {
        if (!text.empty()) {
            message[key] = text_of(message, key) + text;
        }
    };
    add("content", text_of(event, "content"));
    if (json_value(event, "stop", false)) {
        done_reason = text_of(event, "stop_type") == "limit" ? "length" : "stop";
    }
    for (const json & choice : json_value(event, "choices", json::array())) {
        const json & said = choice.at(choice.contains("delta") ? "delta" : "message");
        add("content", text_of(said, "content"));
        add("thinking", text_of(said, "reasoning_content"));
        for (const json & part : json_value(said, "tool_calls", json::array())) {
            add_call(part, message);
        }
        const std::string reason = text_of(choice, "finish_reason");
        if (!reason.empty()) {
            end_call(message);
            done_reason = reason == "length" ? "length" : "stop";
        }
    }
    return message;
}

void ollama_res::add_call(const json & part, json & message) {
    const int index = json_value(part, "index", -1);
    if (!call || index < 0 || index != call->index) {
        end_call(message);
        call = { index, text_of(part, "id"), "", "" };
    }
    const json function = json_value(part, "function", json::object());
    call->name += text_of(function, "name");
    call->arguments += text_of(function, "arguments");
}

void ollama_res::end_call(json & message) {
    if (!call) {
        return;
    }
    json arguments = json::parse_no_throw(call->arguments);
    if (!arguments.is_object()) { // clients count on one
        arguments = call->arguments.empty() ? json::object() : json { { "value", call->arguments } };
    }
    json      calls = json_value(message, "tool_calls", json::array());
    const int index = call->index < 0 ? (int) calls.size() : call->index;
    calls.push_back({ { "id", call->id },
        { "function", json { { "index", index }, { "name", call->name }, { "arguments", arguments } } } });
    message["tool_calls"] = calls;
    call.reset();
}

json ollama_res::line(const json & message) const {
    const auto now                      = std::chrono::system_clock::now().time_since_epoch();
    json       out                      = { { "model", model },
        { "created_at", time_text(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()) } };
    json       said                     = chat ? json { { "role", "assistant" } } : out;
    said[chat ? "content" : "response"] = text_of(message, "content");
    for (const char * key : { "thinking", "tool_calls" }) {
        if (message.contains(key)) {
            said[key] = message.at(key);
        }
    }
    if (chat) {
        out["message"] = said;
    } else {
        out = said;
    }
    out["done"] = false;
    return out;
}

json ollama_res::last_line(const json & message) const {
    const auto ns  = [&](const char * name) { return (int64_t) std::llround(json_value(timings, name, 0.0) * 1e6); };
    json       out = line(message);

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

void ollama_res::start(const handler_t & route) {
    inner = route(req);
    if (inner->is_stream()) {
        content_type = "application/x-ndjson";
        next         = [this](std::string & out) { return next_lines(out); };
    } else if (!inner->data.empty()) { // it is where the client has gone
        const json whole = json::parse(inner->data);
        status           = inner->status;
        data             = safe_json_to_str(status == 200 ? last_line(read(whole)) : error_of(whole));
    }
}

// What the route sends are server-sent events; a call may bring several, or a part of one.
bool ollama_res::next_lines(std::string & out) {
    const auto add = [&](const json & line) { out += safe_json_to_str(line) + "\n"; };
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
                add(error_of(event));
            } else if (const json message = read(event); !message.empty()) {
                add(line(message));
            }
        }
        received.erase(0, begin);
        if (!more && !failed && !done_reason.empty()) {
            add(last_line(json::object()));
        }
        return more;
    } catch (const std::exception & e) { // nobody is above to whom it could go
        add(error_of(json(std::string(e.what()))));
        return false;
    }
}

} // namespace

//
// the model: what llama-server's /models and /props tell, and the loaded metadata
//

static json metadata(const llama_model * model) {
    std::map<std::string, json> values; // the model has them in no order
    for (int32_t i = 0; i < llama_model_meta_count(model); i++) {
        const auto text = [&](auto function) {
            std::string out(function(model, i, nullptr, 0) + 1, '\0');
            function(model, i, &out[0], out.size());
            out.pop_back();
            return out;
        };
        const std::string key = text(llama_model_meta_key_by_index), value = text(llama_model_meta_val_str_by_index);
        const json        parsed = json::parse_no_throw(value);
        const bool        is_name =
            key.rfind("general.", 0) == 0 && key != "general.file_type" && key != "general.quantization_version";
        if (key != "tokenizer.chat_template") {
            values[key] = !is_name && (parsed.is_number() || parsed.is_boolean()) ? parsed : json(value);
        }
    }
    values["general.parameter_count"] = llama_model_n_params(model);

    json out = json::object();
    for (const auto & [key, value] : values) {
        out[key] = value;
    }
    return out;
}

// Of a model's metadata and size: names it, and says nothing about the bytes of its file.
static std::string digest(const json & info, uint64_t size) {
    const std::string text = info.dump_safe() + std::to_string(size);
    std::string       out;
    for (uint64_t part = 0; part < 4; part++) { // FNV-1a, four times
        uint64_t hash = 14695981039346656037ull + part;
        for (const char c : text) {
            hash = (hash ^ (uint8_t) c) * 1099511628211ull;
        }
        out += string_format("%016llx", (unsigned long long) hash);
    }
    return out;
}

// "(guessed) Q4_K - Medium" is Q4_K_M
static std::string quantization(std::string name) {
    for (const char * prefix : { "(guessed) ", "all " }) {
        name.erase(0, name.rfind(prefix, 0) == 0 ? std::strlen(prefix) : 0);
    }
    const size_t      dash = name.find(" - ");
    const std::string size = dash == std::string::npos ? "" : name.substr(dash + 3);
    name                   = name.substr(0, dash);
    return size == "Small" || size == "Medium" || size == "Large" ? name + "_" + size[0] : name;
}

static json model_entry(const json & models, const json & props, const json & info) {
    const json &      first = models.at("data").at(0);
    const json &      meta  = first.at("meta");
    const std::string arch  = text_of(info, "general.architecture");
    const double      n     = meta.at("n_params").get<double>();

    struct stat file = {};
    stat(props.at("model_path").get<std::string>().c_str(), &file);
    return json {
        { "name", first.at("id") },
        { "model", first.at("id") },
        { "modified_at", time_text((int64_t) file.st_mtime * 1000000000) },
        { "size", meta.at("size") },
        { "digest", digest(info, meta.at("size").get<uint64_t>()) },
        { "details",
            json {
                { "parent_model", "" },
                { "format", "gguf" },
                { "family", arch },
                { "families", json::array({ arch }) },
                { "parameter_size", n < 1e9 ? string_format("%.1fM", n / 1e6) : string_format("%.1fB", n / 1e9) },
                { "quantization_level", quantization(meta.at("ftype")) },
            } },
    };
}

static json capabilities(const json & props, bool has_embeddings) {
    const std::string   source = props.at("chat_template");
    const json &        caps   = props.at("chat_template_caps");
    const json &        media  = props.at("modalities");
    const llama_vocab * vocab  = llama_model_get_vocab(server_model());
    const bool          thinks =
        source.find("enable_thinking") != std::string::npos || source.find("<think>") != std::string::npos;
    const bool inserts = llama_vocab_fim_pre(vocab) != LLAMA_TOKEN_NULL
                         && llama_vocab_fim_suf(vocab) != LLAMA_TOKEN_NULL
                         && llama_vocab_fim_mid(vocab) != LLAMA_TOKEN_NULL;
    json       out     = json::array({ "completion" });
    for (const auto & [name, has] : {
             std::pair("tools", json_value(caps, "supports_tools", false)),
             std::pair("thinking", thinks || json_value(caps, "supports_reasoning_effort", false)),
             std::pair("insert", inserts),
             std::pair("vision", json_value(media, "vision", false)),
             std::pair("audio", json_value(media, "audio", false)),
             std::pair("embedding", has_embeddings),
         }) {
        if (has) {
            out.push_back(name);
        }
    }
    return out;
}

//
// requests
//

static json body_of(const server_http_req & req) {
    json body = json::parse(req.body);
    if (!body.is_object()) {
        throw std::invalid_argument("the body must be a JSON object");
    }
    return body;
}

// No headers: X-Conversation-Id would keep a copy of the answer in llama-server's form.
static server_http_req request(const server_http_req & of, const std::string & body) {
    return server_http_req { {}, {}, of.path, "", body, {}, of.should_stop };
}

static json facts(const handler_t & route, const server_http_req & of) {
    return json::parse(route(request(of, ""))->data);
}

// What chats and plain prompts have in common. A num_predict below 1 is no limit.
static json common_request(const json & body, const handler_t & props, const server_http_req & req) {
    json       out     = { { "stream", json_value(body, "stream", true) } };
    const json options = json_value(body, "options", json::object());
    for (const char * name : { "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "repeat_penalty",
             "repeat_last_n", "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta" }) {
        if (options.contains(name)) {
            out[name] = options.at(name);
        }
    }
    const auto is_below = [&](const char * name, int limit) {
        return options.contains(name) && options.at(name).is_number() && options.at(name).get<double>() < limit;
    };
    if (is_below("repeat_last_n", 0)) { // the whole context
        out["repeat_last_n"] = facts(props, req).at("default_generation_settings").at("n_ctx");
    }
    if (options.contains("num_predict") && !is_below("num_predict", 1)) {
        out["n_predict"] = options.at("num_predict");
    }
    const json format = json_value(body, "format", json());
    if (format.is_object()) {
        out["json_schema"] = format;
    } else if (format == "json") {
        out["json_schema"] = json { { "type", "object" } };
    } else if (!format.is_null() && format != "") {
        throw std::invalid_argument("format: expected \"json\" or a JSON schema, found " + format.dump());
    }
    return out;
}

// call_ids: of the calls so far; a call without one gets one, and results without one come in the order of the calls.
static json chat_message(const json & from, std::vector<std::string> & call_ids, size_t & n_results) {
    const std::string role = from.at("role");
    json              to   = { { "role", role }, { "content", json_value(from, "content", json("")) } };

    json parts = json::array();
    for (const json & image : json_value(from, "images", json::array())) {
        const std::string text = image;
        parts.push_back({ { "type", "image_url" },
            { "image_url",
                json { { "url", text.rfind("data:", 0) == 0 ? text : "data:image/png;base64," + text } } } });
    }
    if (!parts.empty()) {
        parts.push_back({ { "type", "text" }, { "text", to.at("content") } });
        to["content"] = parts;
    }
    if (const std::string thinking = text_of(from, "thinking"); !thinking.empty()) {
        to["reasoning_content"] = thinking;
    }
    json calls = json::array();
    for (const json & call : json_value(from, "tool_calls", json::array())) {
        // templates want nine characters
        call_ids.push_back(json_value(call, "id", string_format("call%05d", (int) call_ids.size())));
        json       function   = call.at("function");
        const json arguments  = json_value(function, "arguments", json::object());
        function["arguments"] = arguments.is_string() ? arguments : json(arguments.dump());
        calls.push_back({ { "type", "function" }, { "id", call_ids.back() }, { "function", function } });
    }
    if (!calls.empty()) {
        to["tool_calls"] = calls;
    }
    if (role == "tool") {
        const std::string id = n_results < call_ids.size() ? call_ids[n_results] : "";
        to["tool_call_id"]   = json_value(from, "tool_call_id", id);
        n_results++;
        if (from.contains("tool_name")) {
            to["name"] = from.at("tool_name");
        }
    }
    return to;
}

static void add_chat(json & out, const json & messages, const json & body) {
    std::vector<std::string> call_ids;
    size_t                   n_results = 0;
    out["messages"]                    = json::array();
    for (const json & message : messages) {
        out["messages"].push_back(chat_message(message, call_ids, n_results));
    }
    for (const char * name : { "tools", "tool_choice" }) { // the latter is not Ollama's
        if (body.contains(name) && !body.at(name).empty()) {
            out[name] = body.at(name);
        }
    }
    const json think = json_value(body, "think", json());
    if (think.is_string()) {
        out["reasoning_effort"] = think;
    }
    if (!think.is_null()) {
        out["chat_template_kwargs"] = json { { "enable_thinking", think.is_string() || think == true } };
    }
}

//
// routes
//

namespace {

// llama-server's, each with the wrapper
struct ollama_routes {
    handler_t chat, completion, infill, embeddings, props, models;

    std::string model_name(const json & body, const server_http_req & req) const {
        const std::string name = text_of(body, "model");
        return name.empty() ? facts(models, req).at("data").at(0).at("id").get<std::string>() : name;
    }

    server_http_res_ptr ask(const handler_t & route, const server_http_req & of, const json & asked, const json & body,
        bool is_chat) const {
        auto res = std::make_unique<ollama_res>(request(of, asked.dump()), model_name(body, of), is_chat);
        res->start(route);
        return res;
    }

    // To a request that asks nothing: clients load a model so.
    server_http_res_ptr loaded(const json & body, const server_http_req & of, bool is_chat) const {
        json out           = ollama_res(request(of, ""), model_name(body, of), is_chat).line(json::object());
        out["done"]        = true;
        out["done_reason"] = "load";
        return answer_with(out);
    }

    server_http_res_ptr post_chat(const server_http_req & req) const {
        const json body     = body_of(req);
        const json messages = json_value(body, "messages", json::array());
        if (messages.empty()) {
            return loaded(body, req, /* is_chat */ true);
        }
        json out = common_request(body, props, req);
        add_chat(out, messages, body);
        return ask(chat, req, out, body, /* is_chat */ true);
    }

    // With the template it is a chat of one message. Without, or between a prompt and a suffix, it is a completion.
    server_http_res_ptr post_generate(const server_http_req & req) const {
        const json        body   = body_of(req);
        const std::string prompt = text_of(body, "prompt"), suffix = text_of(body, "suffix"),
                          system = text_of(body, "system");
        const json        images = json_value(body, "images", json::array());
        const bool        raw    = json_value(body, "raw", false);
        if (!text_of(body, "template").empty()) {
            throw std::invalid_argument(
                "template: it is the model's; raw takes a prompt that has been through another one");
        }
        if (!images.empty() && (raw || !suffix.empty())) {
            throw std::invalid_argument("images: they go with a prompt alone, and neither with raw nor with a suffix");
        }
        if (prompt.empty() && suffix.empty() && images.empty()) {
            return loaded(body, req, /* is_chat */ false);
        }
        json out = common_request(body, props, req);
        if (!suffix.empty()) {
            out["input_prefix"] = prompt;
            out["input_suffix"] = suffix;
            return ask(infill, req, out, body, /* is_chat */ false);
        }
        if (raw) {
            out["prompt"] = prompt;
            return ask(completion, req, out, body, /* is_chat */ false);
        }
        json messages = json::array();
        if (!system.empty()) {
            messages.push_back({ { "role", "system" }, { "content", system } });
        }
        messages.push_back({ { "role", "user" }, { "content", prompt }, { "images", images } });
        add_chat(out, messages, body);
        return ask(chat, req, out, body, /* is_chat */ false);
    }

    // key: of the texts. of_one: /api/embeddings, the older route, takes one text.
    server_http_res_ptr post_embed(const server_http_req & req, const char * key, bool of_one) const {
        const int64_t t_start = ggml_time_us();
        const json    body    = body_of(req);
        const json    input   = json_value(body, key, json(""));
        if (json_value(body, "dimensions", 0) != 0) {
            throw std::invalid_argument("dimensions: embeddings have as many as the model's");
        }
        json vectors = json::array(), answer = { { "usage", json::object() } };
        if (!input.empty() && input != "") {
            const auto res = embeddings(request(req, json { { "input", input } }.dump()));
            if (res->data.empty()) {
                return std::make_unique<server_http_res>(); // the client has gone
            }
            answer = json::parse(res->data);
            if (res->status != 200) {
                return answer_with(error_of(answer), res->status);
            }
            for (const json & item : answer.at("data")) {
                vectors.push_back(item.at("embedding"));
            }
        }
        if (of_one) {
            return answer_with(json { { "embedding", vectors.empty() ? vectors : vectors.at(0) } });
        }
        return answer_with(json {
            { "model", model_name(body, req) },
            { "embeddings", vectors },
            { "total_duration", (ggml_time_us() - t_start) * 1000 },
            { "load_duration", 0 },
            { "prompt_eval_count", json_value(answer.at("usage"), "prompt_tokens", 0) },
        });
    }

    json entry(const server_http_req & req, const json & known) const {
        return model_entry(facts(models, req), known, metadata(server_model()));
    }

    server_http_res_ptr get_tags(const server_http_req & req) const {
        return answer_with(json { { "models", json::array({ entry(req, facts(props, req)) }) } });
    }

    server_http_res_ptr get_ps(const server_http_req & req) const {
        const json known = facts(props, req);
        json       model = entry(req, known);
        model.erase("modified_at");
        model["expires_at"]     = "2200-01-01T00:00:00Z"; // not before the server ends
        model["size_vram"]      = 0;
        model["context_length"] = known.at("default_generation_settings").at("n_ctx");
        return answer_with(json { { "models", json::array({ model }) } });
    }

    server_http_res_ptr post_show(const server_http_req & req) const {
        body_of(req);
        const json known = facts(props, req), model = entry(req, known), info = metadata(server_model());
        const bool has_embeddings = embeddings(request(req, "{}"))->status != 501; // a request that asks nothing tells
        const int  n_ctx          = known.at("default_generation_settings").at("n_ctx").get<int>();
        return answer_with(json {
            { "modelfile", "FROM " + text_of(model, "name") + "\n" },
            // clients look here for the context that there is
            { "parameters", string_format("%-30s %d", "num_ctx", n_ctx) },
            { "template", known.at("chat_template") },
            { "license", text_of(info, "general.license") },
            { "details", model.at("details") },
            { "model_info", info },
            { "capabilities", capabilities(known, has_embeddings) },
            { "modified_at", model.at("modified_at") },
        });
    }

    // OpenAI's route for one model, which llama-server has not.
    server_http_res_ptr get_model(const server_http_req & req) const {
        const json known = facts(models, req);
        for (const json & model : known.at("data")) {
            if (text_of(model, "id") == req.get_param("model")) {
                return answer_with(model);
            }
        }
        return answer_with(json::object(), 404); // llama-server puts its own words for it
    }
};

} // namespace

void server_add_ollama_routes(const server_http_context & http, const server_routes & routes,
    const std::function<handler_t(handler_t)> & wrapper) {
    if (!server_has_host()) {
        return;
    }
    const auto to = std::make_shared<const ollama_routes>(ollama_routes {
        wrapper(routes.post_chat_completions),
        wrapper(routes.post_completions),
        wrapper(routes.post_infill),
        wrapper(routes.post_embeddings_oai),
        wrapper(routes.get_props),
        wrapper(routes.get_models),
    });
    using route_t = server_http_res_ptr (ollama_routes::*)(const server_http_req &) const;
    // what a handler here throws is the request's fault
    const auto guarded = [](handler_t handler) -> handler_t {
        return [handler = std::move(handler)](const server_http_req & req) -> server_http_res_ptr {
            try {
                const server_request_memory memory(req.body);
                return handler(req);
            } catch (const std::exception & e) {
                return answer_with(error_of(json(std::string(e.what()))), 400);
            }
        };
    };
    const auto handler = [&](route_t route) {
        return guarded([to, route](const server_http_req & req) { return ((*to).*route)(req); });
    };
    http.get("/v1/models/:model", handler(&ollama_routes::get_model));
    http.post("/api/chat", handler(&ollama_routes::post_chat));
    http.post("/api/generate", handler(&ollama_routes::post_generate));
    http.post("/api/show", handler(&ollama_routes::post_show));
    http.get("/api/tags", handler(&ollama_routes::get_tags));
    http.get("/api/ps", handler(&ollama_routes::get_ps));
    http.post("/api/embed", guarded([to](const server_http_req & req) { return to->post_embed(req, "input", false); }));
    http.post(
        "/api/embeddings", guarded([to](const server_http_req & req) { return to->post_embed(req, "prompt", true); }));
    http.get(
        "/api/version", [](const server_http_req &) { return answer_with(json { { "version", OLLAMA_VERSION } }); });
    const handler_t one_model = [](const server_http_req &) {
        return answer_with(
            error_of(json(std::string("this server has one model, which is given when it starts"))), 501);
    };
    for (const char * path : { "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete" }) {
        http.post(path, one_model);
    }
    http.del("/api/delete", one_model);
}

} // namespace moeoff
