// The model that is served, as Ollama describes one. Reads what llama-server's /models and /props tell, and the loaded metadata.

#pragma once

#include "../server-common.h"

namespace moeoff {

json ollama_model_entry(const json & models, const json & props);                // of /api/tags
json ollama_model_show(const json & models, const json & props, bool has_embeddings); // all of /api/show

} // namespace moeoff
