#include "block_key.h"

#include <cstring>

namespace paged_attn::host {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are hashed as little-endian int32");

constexpr char kSaltLabel[] = "paged_attn salt";

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
  const size_t whole = num_bytes - rest;

  Sha256 hash;
  hash.compress(bytes, whole / 64);
  alignas(16) uint8_t tail[64 + 16 + 32] = {};
  if (rest > 0) std::memcpy(tail, bytes + whole, rest);
  uint8_t* const fields = tail + rest;
  const uint32_t count = static_cast<uint32_t>(block_size);
  fields[0] = 'T';
  std::memcpy(fields + 4, &count, sizeof(count));
  fields[8] = 'P';
  std::memcpy(fields + 16, parent.data(), parent.size());
  return hash.finish(tail, rest + 48, num_bytes + 48);
}

}  // namespace paged_attn::host
