// Checks on a request before and while it is read: the names it may ask for, and the memory its body may take.
// Without hooks every request passes.

#pragma once

#include <cpp-httplib/httplib.h>

#include <string>

namespace moeoff {

// Answers a request with 403 and returns true if its Host or Origin header names a site that the host does not allow.
bool server_refuses_site(
    const httplib::Request & req, httplib::Response & res, const std::string & cors_origins, bool is_socket);

// The body of a request. Its memory is borrowed from the experts until the response has been sent.
struct server_body {
    std::string                text; // empty if the body is a form
    httplib::MultipartFormData form;

    // Returns false if the body cannot be read or does not fit into the budget; the response says why.
    bool read(const httplib::Request & req, httplib::Response & res, const httplib::ContentReader & reader);
};

} // namespace moeoff
