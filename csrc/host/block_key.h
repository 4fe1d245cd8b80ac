#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "sha256.h"

namespace paged_attn::host {

using Token = int32_t;
using Salt = std::optional<std::string>;

// The parent of a sequence's first block: SHA-256 of "paged_attn salt" and a tagged salt, None differing from every
// string.
Digest root_key(const Salt& salt);

// SHA-256 over the block's tokens (int32, little endian), 'T', their number, 'P' and the parent's key. Tokens stand
// first so that hashing them does not wait for the parent: blocks of a chain overlap in the CPU's pipeline.
Digest block_key(const Digest& parent, const Token* tokens, int block_size);

}  // namespace paged_attn::host
