#include "moeoff-server-ollama-model.h"

#include "moeoff-server-hooks.h"
#include "moeoff-server-ollama-answer.h"

#include <sys/stat.h>

#include <cstring>
#include <map>

namespace moeoff {

static json metadata(const llama_model * model) {
    std::map<std::string, json> found; // the model has them in no order
    for (int32_t i = 0; i < llama_model_meta_count(model); i++) {
        const auto text = [&](auto function) {
            std::string out(function(model, i, nullptr, 0) + 1, '\0');
            function(model, i, &out[0], out.size());
            out.pop_back();
            return out;
        };
        const std::string key = text(llama_model_meta_key_by_index), value = text(llama_model_meta_val_str_by_index);
        const json        parsed  = json::parse_no_throw(value);
        const bool        is_name = key.rfind("general.", 0) == 0 && key != "general.file_type" && key != "general.quantization_version";
        const bool        is_text = is_name || !(parsed.is_number() || parsed.is_boolean());
        if (key != "tokenizer.chat_template") {
            found[key] = is_text ? json(value) : parsed;
        }
    }
    json out = json::object();
    for (const auto & [key, value] : found) {
        out[key] = value;
    }
    out["general.parameter_count"] = llama_model_n_params(model);
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
    for (const char * prefix : {"(guessed) ", "all "}) {
        name.erase(0, name.rfind(prefix, 0) == 0 ? std::strlen(prefix) : 0);
    }
    const size_t      dash = name.find(" - ");
    const std::string size = dash == std::string::npos ? "" : name.substr(dash + 3);
    name                   = name.substr(0, dash);
    return size == "Small" || size == "Medium" || size == "Large" ? name + "_" + size[0] : name;
}

json ollama_model_entry(const json & models, const json & props) {
    const json &      first = models.at("data").at(0);
    const json &      meta  = first.at("meta");
    const json        info  = metadata(server_model());
    const std::string arch  = json_value(info, "general.architecture", std::string());
    const double      n     = meta.at("n_params").get<double>();

    struct stat file = {};
    stat(props.at("model_path").get<std::string>().c_str(), &file);
    return json{
        {"name",        first.at("id")},
        {"model",       first.at("id")},
        {"modified_at", ollama_time_text((int64_t) file.st_mtime * 1000000000)},
        {"size",        meta.at("size")},
        {"digest",      digest(info, meta.at("size").get<uint64_t>())},
        {"details",     json{
            {"parent_model",       ""},
            {"format",             "gguf"},
            {"family",             arch},
            {"families",           json::array({arch})},
            {"parameter_size",     n < 1e9 ? string_format("%.1fM", n / 1e6) : string_format("%.1fB", n / 1e9)},
            {"quantization_level", quantization(meta.at("ftype"))},
        }},
    };
}

static json capabilities(const json & props, bool has_embeddings) {
    const std::string   text  = props.at("chat_template");
    const llama_vocab * vocab = llama_model_get_vocab(server_model());
    const std::pair<const char *, bool> all[] = {
        {"completion", true},
        {"tools",      json_value(props.at("chat_template_caps"), "supports_tools", false)},
        {"thinking",   text.find("enable_thinking") != std::string::npos || text.find("<think>") != std::string::npos ||
                       json_value(props.at("chat_template_caps"), "supports_reasoning_effort", false)},
        {"insert",     llama_vocab_fim_pre(vocab) != LLAMA_TOKEN_NULL && llama_vocab_fim_suf(vocab) != LLAMA_TOKEN_NULL &&
                       llama_vocab_fim_mid(vocab) != LLAMA_TOKEN_NULL},
        {"vision",     json_value(props.at("modalities"), "vision", false)},
        {"audio",      json_value(props.at("modalities"), "audio", false)},
        {"embedding",  has_embeddings},
    };
    json out = json::array();
    for (const auto & [name, has] : all) {
        if (has) {
            out.push_back(name);
        }
    }
    return out;
}

json ollama_model_show(const json & models, const json & props, bool has_embeddings) {
    const json        entry = ollama_model_entry(models, props);
    const json        info  = metadata(server_model());
    const std::string name  = entry.at("name");
    const int         n_ctx = props.at("default_generation_settings").at("n_ctx").get<int>();
    return json{
        {"modelfile",    "FROM " + name + "\n"},
        {"parameters",   string_format("%-30s %d", "num_ctx", n_ctx)}, // clients look here for the context that there is
        {"template",     props.at("chat_template")},
        {"license",      json_value(info, "general.license", std::string())},
        {"details",      entry.at("details")},
        {"model_info",   info},
        {"capabilities", capabilities(props, has_embeddings)},
        {"modified_at",  entry.at("modified_at")},
    };
}

} // namespace moeoff
