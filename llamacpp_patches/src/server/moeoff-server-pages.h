// Routes in addition to llama-server's own. Without hooks nothing is added.

#pragma once

#include "../server-context.h"

#include <functional>

namespace moeoff {

// What llama-server's web page and the host's ask for.
void server_add_pages(const server_http_context & http);

// Ollama's API. wrapper: makes an error answer of what a route of llama-server's throws.
void server_add_ollama_routes(const server_http_context & http, const server_routes & routes,
    const std::function<server_http_context::handler_t(server_http_context::handler_t)> & wrapper);

} // namespace moeoff
