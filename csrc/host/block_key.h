#pragma once
#include <cstddef>
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

// SHA-256 over the block's tokens (int32, little endian), 'T', their number, 'P' and the parent's key.
Digest block_key(const Digest& parent, const Token* tokens, int block_size);

// The keys of the blocks of a sequence one after the other. Tokens stand first in a key's message, so the tokens of the
// next block are hashed while the key before it is still being made.
class KeyChain {
 public:
  KeyChain(const Digest& parent, const Token* tokens, int64_t num_blocks, int block_size);

  // The next of num_blocks keys.
  Digest next();

 private:
  Digest parent_;
  const Token* tokens_;
  int64_t num_blocks_;
  const int block_size_;
  const bool whole_chunks_;            // the tokens of a block fill chunks of SHA-256 exactly
  Sha256 ahead_;                       // has absorbed the next block's tokens, if whole_chunks_
  alignas(16) uint8_t last_[64] = {};  // the last chunk of a message: fields and padding, if whole_chunks_
};

}  // namespace paged_attn::host
