#include "moeoff-server-pages.h"

#include "moeoff-server-hooks.h"

namespace moeoff {

const char * const SERVER_PAGE = "/moeoff";

static server_http_context::handler_t answers(
    const char * type, const std::string & text, const std::map<std::string, std::string> & headers) {
    return [=](const server_http_req &) {
        auto res          = std::make_unique<server_http_res>();
        res->content_type = type;
        res->headers      = headers;
        res->data         = text;
        return res;
    };
}

// Of the first of two handlers for a path is the answer.
void server_add_pages(const server_http_context & http) {
    if (!server_has_host()) {
        return;
    }
    http.get(SERVER_PAGE, answers("text/html; charset=utf-8", server_host()->page,
                              { { "Cache-Control", "no-cache" },
                                  { "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; "
                                                               "script-src 'unsafe-inline'; connect-src 'self'" } }));
    // llama-server's page asks which tools there are, before each answer, and one of them where its files are. What
    // llama-server says where they are off, 403, is an error in every browser's console
    http.get("/tools", answers("application/json; charset=utf-8", "[]", {}));
    http.post("/tools", answers("application/json; charset=utf-8", R"({"error": "this server runs no tools"})", {}));
}

} // namespace moeoff
