// What llama-server's web page and the host's ask for beside the routes of llama-server's own. Without hooks nothing is added.

#pragma once

#include "../server-http.h"

namespace moeoff {

void server_add_pages(const server_http_context & http);

} // namespace moeoff
