#include "block_key.h"

#include <cstring>

namespace paged_attn::host {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are hashed as little-endian int32");

constexpr char kSaltLabel[] = "paged_attn salt";
constexpr size_t kParentAt = 16, kFieldBytes = 48;

// What follows the tokens: 'T', their number, 'P', the parent's key; zeroed before.
void write_fields(uint8_t* out, int block_size, const Digest& parent) {
  const uint32_t count = static_cast<uint32_t>(block_size);
  out[0] = 'T';
  std::memcpy(out + 4, &count, sizeof(count));
  out[8] = 'P';
  std::memcpy(out + kParentAt, parent.data(), parent.size());
}

}  // namespace

Digest root_key(const Salt& salt) {
  std::string message(kSaltLabel, sizeof(kSaltLabel));
  message += salt ? 'S' : 'N';
  if (salt) message += *salt;
  return sha256(message.data(), message.size());
}

Digest block_key(const Digest& parent, const Token* tokens, int block_size) {
  const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(tokens);
  const size_t num_bytes = static_cast<size_t>(block_size) * sizeof(Token);
  const size_t rest = num_bytes % 64;
  Sha256 hash;
  hash.compress(bytes, num_bytes / 64);
  uint8_t tail[64 + kFieldBytes] = {};
  if (rest > 0) std::memcpy(tail, bytes + num_bytes - rest, rest);
  write_fields(tail + rest, block_size, parent);
  return hash.finish(tail, rest + kFieldBytes, num_bytes + kFieldBytes);
}

KeyChain::KeyChain(const Digest& parent, const Token* tokens, int64_t num_blocks, int block_size)
    : parent_(parent),
      tokens_(tokens),
      num_blocks_(num_blocks),
      block_size_(block_size),
      whole_chunks_(block_size % 16 == 0) {
  if (!whole_chunks_ || num_blocks == 0) return;
  ahead_.compress(reinterpret_cast<const uint8_t*>(tokens), static_cast<size_t>(block_size) / 16);
  write_fields(last_, block_size, parent);
  last_[kFieldBytes] = 0x80;
  const uint64_t num_bits = 8 * (static_cast<uint64_t>(block_size) * sizeof(Token) + kFieldBytes);
  for (int i = 0; i < 8; ++i) last_[63 - i] = static_cast<uint8_t>(num_bits >> (8 * i));
}

Digest KeyChain::next() {
  const Token* const following = tokens_ + block_size_;
  if (!whole_chunks_) {
    parent_ = block_key(parent_, tokens_, block_size_);
  } else {
    std::memcpy(last_ + kParentAt, parent_.data(), parent_.size());
    Sha256 hash = ahead_;
    if (num_blocks_ > 1) {
      const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(following);
      ahead_ = Sha256();
      Sha256::compress_pair(hash, last_, ahead_, bytes);
      ahead_.compress(bytes + 64, static_cast<size_t>(block_size_) / 16 - 1);
    } else {
      hash.compress(last_, 1);
    }
    parent_ = hash.digest();
  }
  tokens_ = following;
  --num_blocks_;
  return parent_;
}

}  // namespace paged_attn::host
