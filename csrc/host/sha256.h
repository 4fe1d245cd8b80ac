#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace paged_attn::host {

using Digest = std::array<uint8_t, 32>;

// SHA-256 (FIPS 180-4). Uses the SHA instructions of x86 where the running CPU has them.
class Sha256 {
 public:
  // Absorb whole 64-byte chunks.
  void compress(const uint8_t* data, size_t num_chunks);

  // Absorb one chunk into each of two states at once: little slower than one, for a chunk's rounds wait on each other.
  static void compress_pair(Sha256& a, const uint8_t* data_a, Sha256& b, const uint8_t* data_b);

  // Absorb the last `size` bytes and the padding; `total_size` is the length of the whole message in bytes.
  Digest finish(const uint8_t* tail, size_t size, uint64_t total_size);

  // The digest, when the padding has been absorbed.
  Digest digest() const;

 private:
  alignas(16) uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
};

Digest sha256(const void* data, size_t size);

// True where the SHA instructions are in use. `sha256_use_instructions(false)` forces the portable code, for tests.
bool sha256_has_instructions();
bool sha256_use_instructions(bool wanted);

}  // namespace paged_attn::host
