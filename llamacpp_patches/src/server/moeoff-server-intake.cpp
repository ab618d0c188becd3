#include "moeoff-server-intake.h"

#include "moeoff-server-hooks.h"

#include "../server-common.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <mutex>

namespace moeoff {

static void refuse(httplib::Response & res, int status, const char * type, const std::string & message) {
    res.status = status;
    res.set_content(safe_json_to_str({ { "error", { { "code", status }, { "message", message }, { "type", type } } } }),
        "application/json; charset=utf-8");
}

//
// sites
//

// Returns the lower-case host of "host", "host:port" or "[address]:port"; of anything else all of it.
static std::string host_name(std::string site) {
    const size_t end = site.find_last_not_of("0123456789");
    if (end != std::string::npos && site[end] == ':' && (site.find(':') == end || site[end - 1] == ']')) {
        site.resize(end);
    }
    std::transform(site.begin(), site.end(), site.begin(), [](unsigned char c) { return std::tolower(c); });
    return site;
}

static bool is_loopback(const std::string & name) {
    in_addr address;
    return name == "localhost" || name == "[::1]"
           || (inet_pton(AF_INET, name.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127);
}

static bool is_allowed(const std::string & site) {
    const std::string name = host_name(site);
    if (is_loopback(name)) {
        return true;
    }
    const auto allowed = string_split<std::string>(server_host()->allowed_hosts, ',');
    return std::any_of(allowed.begin(), allowed.end(),
        [&](const std::string & one) { return !one.empty() && host_name(one) == name; });
}

// A web page can point a name of its own at 127.0.0.1. The browser then takes this server for a part of that site, but
// still sends the site's name as Host, and as Origin with every request that a page makes of another site.
bool server_refuses_site(
    const httplib::Request & req, httplib::Response & res, const std::string & cors_origins, bool is_socket) {
    if (!server_has_host() || server_host()->allowed_hosts == nullptr
        || (is_socket && server_host()->checks_sockets == 0)) {
        return false;
    }
    static const char * const WHY = " is refused: without an API key this server answers local sites only; "
                                    "restart it with --api-key, or with ";

    const auto origins = string_split<std::string>(cors_origins, ',');
    for (const auto & [key, value] : req.headers) {
        const std::string shown = value.substr(0, 200);
        if (strcasecmp(key.c_str(), "Host") == 0 && !is_allowed(value)) {
            refuse(res, 403, "permission_error", "Host " + shown + WHY + "--allowed-hosts " + host_name(shown));
            return true;
        }
        if (strcasecmp(key.c_str(), "Origin") == 0 && cors_origins != "*"
            && std::find(origins.begin(), origins.end(), value) == origins.end()) {
            const size_t scheme = value.find("://");
            if (scheme == std::string::npos || !is_allowed(value.substr(scheme + 3))) {
                refuse(res, 403, "permission_error", "Origin " + shown + WHY + "--cors " + shown);
                return true;
            }
        }
    }
    return false;
}

//
// bodies
//

namespace {

const int64_t FREE       = 16 << 10; // bytes of each body that are not weighed: large ones must not keep out others
const int64_t STEP       = 1 << 20;  // bytes that are borrowed at a time
const size_t  MAX_GROWTH = 16 << 20; // bytes by which a body's capacity grows at most

std::mutex bodies_mutex;
int64_t    bodies_nbytes = 0;
int64_t    bodies_lent   = 0;

// Moves the memory of all bodies by so many bytes; false if the budget does not have them.
bool resize_bodies(int64_t more) {
    std::lock_guard<std::mutex> lock(bodies_mutex);
    const int64_t               nbytes = bodies_nbytes + more;
    const int64_t               lent   = nbytes > server_loan::in_reserve ? (nbytes + STEP - 1) / STEP * STEP : 0;
    char                        text[1024];
    if (lent != bodies_lent && server_has_host()) {
        const bool refused = server_host()->borrow(lent - bodies_lent, text, sizeof(text)) != 0;
        if (refused && more > 0) {
            return false;
        }
    }
    bodies_nbytes = nbytes;
    bodies_lent   = lent;
    return true;
}

// The memory of one body.
class body_memory {
  public:
    body_memory() = default;
    ~body_memory() { charge(-nbytes); }
    body_memory(const body_memory &)             = delete;
    body_memory & operator=(const body_memory &) = delete;

    // Moves the memory of this body by so many bytes; false if the budget does not have them.
    bool charge(int64_t more) {
        const int64_t weighed = std::max(nbytes + more - FREE, (int64_t) 0) - std::max(nbytes - FREE, (int64_t) 0);
        const bool    fits    = weighed == 0 || resize_bodies(weighed);
        nbytes += fits ? more : 0;
        return fits;
    }

    // Gives a text the capacity for n bytes more. While the text moves, both its old and its new memory are charged.
    bool grow(std::string & text, size_t n) {
        const size_t in_place = std::string().capacity(), needed = text.size() + n, old = text.capacity();
        if (needed <= old) {
            return true;
        }
        const size_t capacity = old == in_place ? needed : std::max(needed, old + std::min(old, MAX_GROWTH));
        if (!charge((int64_t) capacity)) {
            return false;
        }
        {
            std::string moved; // text.reserve() would double the capacity
            moved.reserve(capacity);
            moved.append(text);
            text.swap(moved);
        }
        if (old > in_place) {
            charge(-(int64_t) old);
        }
        return true;
    }

  private:
    int64_t nbytes = 0;
};

} // namespace

static bool append(body_memory & memory, bool & fits, std::string & text, const char * data, size_t n) {
    fits = memory.grow(text, n);
    if (fits) {
        text.append(data, n);
    }
    return fits;
}

bool server_body::read(const httplib::Request & req, httplib::Response & res, const httplib::ContentReader & reader) {
    const auto memory = std::make_shared<body_memory>();

    const size_t length = req.get_header_value_u64("Content-Length");
    bool         fits   = length <= CPPHTTPLIB_PAYLOAD_MAX_LENGTH;
    bool         done   = false;
    if (req.is_multipart_form_data()) {
        std::string * part    = nullptr;
        size_t        n_parts = 0;
        done                  = fits
                                && reader(
                                    [&](const httplib::FormData & file) {
                       if (file.filename.empty()) {
                           const httplib::FormField field { file.name, "", file.headers };
                           part = &form.fields.emplace(file.name, field)->second.content;
                       } else {
                           part = &form.files.emplace(file.name, file)->second.content;
                       }
                       return ++n_parts <= CPPHTTPLIB_MULTIPART_FORM_DATA_FILE_MAX_COUNT;
                                    },
                                    [&](const char * data, size_t n) { return append(*memory, fits, *part, data, n); });
        for (const auto & [key, file] : form.files) { // llama-server copies them
            fits = fits && memory->charge((int64_t) file.content.size());
        }
    } else {
        // what is announced is borrowed before it is read
        fits = fits && memory->grow(text, length);
        done = fits && reader([&](const char * data, size_t n) { return append(*memory, fits, text, data, n); });
    }
    if (!fits) {
        refuse(res, 413, "invalid_request_error",
            "the request body does not fit into the memory budget (--memory): send a shorter one, or try again when "
            "the server reads fewer of them");
    }
    if (done && fits) {
        res.user_data.set("moeoff-body", memory); // which lives as long as the response
        return true;
    }
    text = std::string();
    form = httplib::MultipartFormData();
    return false;
}

} // namespace moeoff
