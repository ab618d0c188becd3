// What llama-server answers, in Ollama's form: a JSON object, or a line of JSON for each event of a stream.

#pragma once

#include "../server-common.h"
#include "../server-http.h"

namespace moeoff {

std::string ollama_time_text(int64_t ns); // since 1970, as RFC 3339 writes it

// {"error": text}, of a text or of an error of llama-server's.
std::string ollama_error_text(const json & error);

// One answer: llama-server's events, or its one object, in; Ollama's out. Both forms of llama-server's are read: that of
// /v1/chat/completions and that of /completion.
class ollama_answer {
  public:
    struct piece {
        std::string content, thinking;
        json        tool_calls = json::array();

        bool empty() const { return content.empty() && thinking.empty() && tool_calls.empty(); }
    };

    ollama_answer(const std::string & model, bool chat) : model(model), chat(chat) {}

    piece read(const json & event);
    bool  is_done() const { return !done_reason.empty(); }

    json line(const piece & said) const;
    json last_line(const piece & said) const;
    json loaded_line() const; // to a request that asks nothing: clients load a model so

  private:
    void add_call(const json & part, json & tool_calls);
    void end_call(json & tool_calls);

    std::string model;
    bool        chat; // and not /api/generate
    int64_t     t_start = ggml_time_us();
    std::string done_reason;
    json        timings = json::object();
    json        usage   = nullptr; // of the expert buffer
    json        call    = nullptr; // one that has begun: a stream brings its arguments in parts of a text
};

// The answer that a client gets. It holds the request that was made of the client's: the route may look at it until the end.
class ollama_res : public server_http_res {
  public:
    ollama_res(server_http_req req, const ollama_answer & answer) : req(std::move(req)), answer(answer) {}

    void start(const server_http_context::handler_t & route);
    void on_complete() override { inner->on_complete(); }

  private:
    bool next_lines(std::string & out);

    const server_http_req req;
    ollama_answer         answer;
    server_http_res_ptr   inner;
    std::string           received; // of a stream: a line that is not complete yet
};

} // namespace moeoff
