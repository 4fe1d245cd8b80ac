// Refusals of what only the contents of a tensor can show.
#pragma once

#include <sstream>
#include <stdexcept>

namespace paged_attn::cpu {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace paged_attn::cpu
