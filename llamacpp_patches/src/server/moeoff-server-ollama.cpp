#include "moeoff-server-ollama.h"

#include "moeoff-server-hooks.h"
#include "moeoff-server-ollama-answer.h"
#include "moeoff-server-ollama-model.h"

namespace moeoff {

using handler_t = server_http_context::handler_t;

// Clients compare it with the release that brought what they want to use. What is here, with levels of thinking and
// capabilities, is what 0.12 has.
static const char * const OLLAMA_VERSION = "0.12.0";

static server_http_res_ptr answer_with(const std::string & data, int status = 200) {
    auto res    = std::make_unique<server_http_res>();
    res->status = status;
    res->data   = data;
    return res;
}

// What a handler here throws is the request's fault.
static handler_t guarded(handler_t handler) {
    return [handler = std::move(handler)](const server_http_req & req) -> server_http_res_ptr {
        try {
            return handler(req);
        } catch (const std::exception & e) {
            return answer_with(ollama_error_text(json(std::string(e.what()))), 400);
        }
    };
}

static json body_of(const server_http_req & req) {
    json body = json::parse(req.body);
    if (!body.is_object()) {
        throw std::invalid_argument("the body must be a JSON object");
    }
    return body;
}

// No headers: X-Conversation-Id would keep a copy of the answer in llama-server's form.
static server_http_req request(const server_http_req & of, const std::string & body) {
    return server_http_req{{}, {}, of.path, "", body, {}, of.should_stop};
}

static json facts(const handler_t & route, const server_http_req & of) {
    return json::parse(route(request(of, ""))->data);
}

static server_http_res_ptr ask(const handler_t & route, const server_http_req & of, const json & body, const ollama_answer & answer) {
    auto res = std::make_unique<ollama_res>(request(of, body.dump()), answer);
    res->start(route);
    return res;
}

//
// requests
//

// What chats and plain prompts have in common. A num_predict below 1 is no limit.
static json common_request(const json & body, const handler_t & props, const server_http_req & req) {
    json       out     = {{"stream", json_value(body, "stream", true)}};
    const json options = json_value(body, "options", json::object());
    for (const char * name : {"temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "repeat_penalty", "repeat_last_n",
                              "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"}) {
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
        out["json_schema"] = json{{"type", "object"}};
    } else if (!format.is_null() && format != "") {
        throw std::invalid_argument("format: expected \"json\" or a JSON schema, found " + format.dump());
    }
    return out;
}

// call_ids: of the calls so far; a call without one gets one, and results without one come in the order of the calls.
static json chat_message(const json & from, std::vector<std::string> & call_ids, size_t & n_results) {
    const std::string role = from.at("role");
    json              to   = {{"role", role}, {"content", json_value(from, "content", json(""))}};

    json parts = json::array();
    for (const json & image : json_value(from, "images", json::array())) {
        const std::string text = image;
        parts.push_back({{"type", "image_url"}, {"image_url", json{{"url", text.rfind("data:", 0) == 0 ? text : "data:image/png;base64," + text}}}});
    }
    if (!parts.empty()) {
        parts.push_back({{"type", "text"}, {"text", to.at("content")}});
        to["content"] = parts;
    }
    const std::string thinking = json_value(from, "thinking", std::string());
    if (!thinking.empty()) {
        to["reasoning_content"] = thinking;
    }
    json calls = json::array();
    for (const json & call : json_value(from, "tool_calls", json::array())) {
        call_ids.push_back(json_value(call, "id", string_format("call%05d", (int) call_ids.size()))); // templates want nine characters
        json       function   = call.at("function");
        const json arguments  = json_value(function, "arguments", json::object());
        function["arguments"] = arguments.is_string() ? arguments : json(arguments.dump());
        calls.push_back({{"type", "function"}, {"id", call_ids.back()}, {"function", function}});
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
    for (const char * name : {"tools", "tool_choice"}) { // the latter is not Ollama's
        if (body.contains(name) && !body.at(name).empty()) {
            out[name] = body.at(name);
        }
    }
    const json think = json_value(body, "think", json());
    if (think.is_string()) {
        out["reasoning_effort"] = think;
    }
    if (!think.is_null()) {
        out["chat_template_kwargs"] = json{{"enable_thinking", think.is_string() || think == true}};
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
        const std::string name = json_value(body, "model", std::string());
        return name.empty() ? facts(models, req).at("data").at(0).at("id").get<std::string>() : name;
    }

    server_http_res_ptr post_chat(const server_http_req & req) const {
        const json          body     = body_of(req);
        const json          messages = json_value(body, "messages", json::array());
        const ollama_answer answer(model_name(body, req), /* chat */ true);
        if (messages.empty()) {
            return answer_with(safe_json_to_str(answer.loaded_line()));
        }
        json out = common_request(body, props, req);
        add_chat(out, messages, body);
        return ask(chat, req, out, answer);
    }

    // With the template it is a chat of one message. Without, or between a prompt and a suffix, it is a completion.
    server_http_res_ptr post_generate(const server_http_req & req) const {
        const json          body   = body_of(req);
        const std::string   prompt = json_value(body, "prompt", std::string());
        const std::string   suffix = json_value(body, "suffix", std::string());
        const std::string   system = json_value(body, "system", std::string());
        const json          images = json_value(body, "images", json::array());
        const bool          raw    = json_value(body, "raw", false);
        const ollama_answer answer(model_name(body, req), /* chat */ false);
        if (!json_value(body, "template", std::string()).empty()) {
            throw std::invalid_argument("template: it is the model's; raw takes a prompt that has been through another one");
        }
        if (!images.empty() && (raw || !suffix.empty())) {
            throw std::invalid_argument("images: they go with a prompt alone, and neither with raw nor with a suffix");
        }
        if (prompt.empty() && suffix.empty() && images.empty()) {
            return answer_with(safe_json_to_str(answer.loaded_line()));
        }
        json out = common_request(body, props, req);
        if (!suffix.empty()) {
            out["input_prefix"] = prompt;
            out["input_suffix"] = suffix;
            return ask(infill, req, out, answer);
        }
        if (raw) {
            out["prompt"] = prompt;
            return ask(completion, req, out, answer);
        }
        json messages = json::array();
        if (!system.empty()) {
            messages.push_back({{"role", "system"}, {"content", system}});
        }
        messages.push_back({{"role", "user"}, {"content", prompt}, {"images", images}});
        add_chat(out, messages, body);
        return ask(chat, req, out, answer);
    }

    // key: of the texts. of_one: /api/embeddings, the older route, takes one text.
    server_http_res_ptr post_embed(const server_http_req & req, const char * key, bool of_one) const {
        const int64_t t_start = ggml_time_us();
        const json    body    = body_of(req);
        const json    input   = json_value(body, key, json(""));
        if (json_value(body, "dimensions", 0) != 0) {
            throw std::invalid_argument("dimensions: embeddings have as many as the model's");
        }
        json vectors = json::array(), answer = {{"usage", json::object()}};
        if (!input.empty() && input != "") {
            const auto res = embeddings(request(req, json{{"input", input}}.dump()));
            if (res->data.empty()) {
                return answer_with(""); // the client has gone
            }
            answer = json::parse(res->data);
            if (res->status != 200) {
                return answer_with(ollama_error_text(answer), res->status);
            }
            for (const json & item : answer.at("data")) {
                vectors.push_back(item.at("embedding"));
            }
        }
        if (of_one) {
            return answer_with(safe_json_to_str(json{{"embedding", vectors.empty() ? vectors : vectors.at(0)}}));
        }
        return answer_with(safe_json_to_str(json{
            {"model",             model_name(body, req)},
            {"embeddings",        vectors},
            {"total_duration",    (ggml_time_us() - t_start) * 1000},
            {"load_duration",     0},
            {"prompt_eval_count", json_value(answer.at("usage"), "prompt_tokens", 0)},
        }));
    }

    server_http_res_ptr get_tags(const server_http_req & req) const {
        return answer_with(safe_json_to_str(json{{"models", json::array({ollama_model_entry(facts(models, req), facts(props, req))})}}));
    }

    server_http_res_ptr get_ps(const server_http_req & req) const {
        const json known = facts(props, req);
        json       entry = ollama_model_entry(facts(models, req), known);
        entry.erase("modified_at");
        entry["expires_at"]     = "2200-01-01T00:00:00Z"; // not before the server ends
        entry["size_vram"]      = 0;
        entry["context_length"] = known.at("default_generation_settings").at("n_ctx");
        return answer_with(safe_json_to_str(json{{"models", json::array({entry})}}));
    }

    server_http_res_ptr post_show(const server_http_req & req) const {
        body_of(req);
        const bool has_embeddings = embeddings(request(req, "{}"))->status != 501; // a request that asks nothing tells
        return answer_with(safe_json_to_str(ollama_model_show(facts(models, req), facts(props, req), has_embeddings)));
    }
};

// OpenAI's route for one model, which llama-server has not.
server_http_res_ptr get_model(const handler_t & models, const server_http_req & req) {
    const std::string wanted = req.get_param("model");
    const json        known  = facts(models, req);
    for (const json & entry : known.at("data")) {
        if (json_value(entry, "id", std::string()) == wanted) {
            return answer_with(safe_json_to_str(entry));
        }
    }
    return answer_with("", 404); // llama-server puts its own words for it
}

} // namespace

void server_add_ollama_routes(const server_http_context & http, const server_routes & routes,
                              const std::function<handler_t(handler_t)> & wrapper) {
    if (!server_has_host()) {
        return;
    }
    const auto to = std::make_shared<const ollama_routes>(ollama_routes{
        wrapper(routes.post_chat_completions), wrapper(routes.post_completions), wrapper(routes.post_infill),
        wrapper(routes.post_embeddings_oai),   wrapper(routes.get_props),        wrapper(routes.get_models),
    });
    http.get ("/v1/models/:model", [to](const server_http_req & req) { return get_model(to->models, req); });
    http.post("/api/chat",       guarded([to](const server_http_req & req) { return to->post_chat(req); }));
    http.post("/api/generate",   guarded([to](const server_http_req & req) { return to->post_generate(req); }));
    http.post("/api/embed",      guarded([to](const server_http_req & req) { return to->post_embed(req, "input", false); }));
    http.post("/api/embeddings", guarded([to](const server_http_req & req) { return to->post_embed(req, "prompt", true); }));
    http.post("/api/show",       guarded([to](const server_http_req & req) { return to->post_show(req); }));
    http.get ("/api/tags",       guarded([to](const server_http_req & req) { return to->get_tags(req); }));
    http.get ("/api/ps",         guarded([to](const server_http_req & req) { return to->get_ps(req); }));
    const handler_t one_model = [](const server_http_req &) {
        return answer_with(ollama_error_text(json(std::string("this server has one model, which is given when it starts"))), 501);
    };
    for (const char * path : { "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete" }) {
        http.post(path, one_model);
    }
    http.del("/api/delete", one_model);
    http.get ("/api/version",    guarded([](const server_http_req &) { return answer_with(safe_json_to_str(json{{"version", OLLAMA_VERSION}})); }));
}

} // namespace moeoff
