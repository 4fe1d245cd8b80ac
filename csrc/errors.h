// Refusals.  One names the argument, what came and what is needed, and becomes a ValueError in Python.
#pragma once

#include <sstream>
#include <stdexcept>

namespace paged_attn {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace paged_attn
