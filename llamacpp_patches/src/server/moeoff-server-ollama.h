// Ollama's API: each request becomes one of llama-server's own routes, and its answer becomes Ollama's.
//
// There is one model, whatever name a request gives; it is loaded, and stays so: keep_alive, num_ctx and the like change nothing.
// Knows about the model what llama-server's routes and the loaded metadata tell. Without hooks nothing is added.

#pragma once

#include "../server-context.h"

#include <functional>

namespace moeoff {

// wrapper: makes an error answer of what a route of llama-server's throws.
void server_add_ollama_routes(const server_http_context & http, const server_routes & routes,
                              const std::function<server_http_context::handler_t(server_http_context::handler_t)> & wrapper);

} // namespace moeoff
