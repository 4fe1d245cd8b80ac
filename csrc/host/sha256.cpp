#include "sha256.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define PAGED_ATTN_X86_SHA 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace paged_attn::host {
namespace {

// First 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(64) constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t rotate_right(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are swapped from little endian");

constexpr uint32_t swap_bytes(uint32_t x) { return x >> 24 | (x >> 8 & 0xff00) | (x << 8 & 0xff0000) | x << 24; }

uint32_t load_big_endian(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof(x));
  return swap_bytes(x);
}

void store_big_endian(uint8_t* p, uint32_t x) {
  x = swap_bytes(x);
  std::memcpy(p, &x, sizeof(x));
}

void compress_portable(uint32_t* state, const uint8_t* data, size_t num_chunks) {
  for (; num_chunks > 0; --num_chunks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::memcpy(v, state, sizeof(v));
    auto& [a, b, c, d, e, f, g, h] = v;
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[i] + w[i];
      const uint32_t s0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

#ifdef PAGED_ATTN_X86_SHA
#define PAGED_ATTN_SHA_TARGET __attribute__((target("sha,sse4.1")))

// Four rounds on message words `w`. The instructions keep the state as (A, B, E, F) and (C, D, G, H).
PAGED_ATTN_SHA_TARGET inline void four_rounds(__m128i& abef, __m128i& cdgh, __m128i w, int group) {
  const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants) + group);
  __m128i wk = _mm_add_epi32(w, k);
  cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
  wk = _mm_shuffle_epi32(wk, 0x0e);
  abef = _mm_sha256rnds2_epu32(abef, cdgh, wk);
}

// Message words 16 places after `m0`, from the four vectors before them.
PAGED_ATTN_SHA_TARGET inline __m128i next_words(__m128i m0, __m128i m1, __m128i m2, __m128i m3) {
  const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(m0, m1), _mm_alignr_epi8(m3, m2, 4));
  return _mm_sha256msg2_epu32(sum, m3);
}

// A state and the chunk it absorbs, in registers.
struct Lane {
  __m128i abef, cdgh, abef_before, cdgh_before, m0, m1, m2, m3;

  PAGED_ATTN_SHA_TARGET void load_state(const uint32_t* state) {
    const __m128i* const words = reinterpret_cast<const __m128i*>(state);
    const __m128i cdab = _mm_shuffle_epi32(_mm_load_si128(words), 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_load_si128(words + 1), 0x1b);
    abef = _mm_alignr_epi8(cdab, efgh, 8);
    cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  }

  PAGED_ATTN_SHA_TARGET void store_state(uint32_t* state) const {
    __m128i* const words = reinterpret_cast<__m128i*>(state);
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_store_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_store_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
  }

  PAGED_ATTN_SHA_TARGET void load_chunk(const uint8_t* data) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i* const chunk = reinterpret_cast<const __m128i*>(data);
    m0 = _mm_shuffle_epi8(_mm_loadu_si128(chunk), big_endian);
    m1 = _mm_shuffle_epi8(_mm_loadu_si128(chunk + 1), big_endian);
    m2 = _mm_shuffle_epi8(_mm_loadu_si128(chunk + 2), big_endian);
    m3 = _mm_shuffle_epi8(_mm_loadu_si128(chunk + 3), big_endian);
    abef_before = abef;
    cdgh_before = cdgh;
  }

  PAGED_ATTN_SHA_TARGET void add_before() {
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
};

// The 64 rounds of every lane, four at a time in turn.
template <typename... Lanes>
PAGED_ATTN_SHA_TARGET inline void all_rounds(Lanes&... lanes) {
  for (int group = 0; group < 12; group += 4) {
    (four_rounds(lanes.abef, lanes.cdgh, lanes.m0, group), ...);
    ((lanes.m0 = next_words(lanes.m0, lanes.m1, lanes.m2, lanes.m3)), ...);
    (four_rounds(lanes.abef, lanes.cdgh, lanes.m1, group + 1), ...);
    ((lanes.m1 = next_words(lanes.m1, lanes.m2, lanes.m3, lanes.m0)), ...);
    (four_rounds(lanes.abef, lanes.cdgh, lanes.m2, group + 2), ...);
    ((lanes.m2 = next_words(lanes.m2, lanes.m3, lanes.m0, lanes.m1)), ...);
    (four_rounds(lanes.abef, lanes.cdgh, lanes.m3, group + 3), ...);
    ((lanes.m3 = next_words(lanes.m3, lanes.m0, lanes.m1, lanes.m2)), ...);
  }
  (four_rounds(lanes.abef, lanes.cdgh, lanes.m0, 12), ...);
  (four_rounds(lanes.abef, lanes.cdgh, lanes.m1, 13), ...);
  (four_rounds(lanes.abef, lanes.cdgh, lanes.m2, 14), ...);
  (four_rounds(lanes.abef, lanes.cdgh, lanes.m3, 15), ...);
  (lanes.add_before(), ...);
}

PAGED_ATTN_SHA_TARGET void compress_x86(uint32_t* state, const uint8_t* data, size_t num_chunks) {
  Lane lane;
  lane.load_state(state);
  for (; num_chunks > 0; --num_chunks, data += 64) {
    lane.load_chunk(data);
    all_rounds(lane);
  }
  lane.store_state(state);
}

PAGED_ATTN_SHA_TARGET void compress_pair_x86(uint32_t* state_a, const uint8_t* data_a, uint32_t* state_b,
                                             const uint8_t* data_b) {
  Lane a, b;
  a.load_state(state_a);
  b.load_state(state_b);
  a.load_chunk(data_a);
  b.load_chunk(data_b);
  all_rounds(a, b);
  a.store_state(state_a);
  b.store_state(state_b);
}

bool cpu_has_sha() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}
#endif

struct Code {
  void (*compress)(uint32_t*, const uint8_t*, size_t);
  void (*compress_pair)(uint32_t*, const uint8_t*, uint32_t*, const uint8_t*);
};

void compress_pair_portable(uint32_t* state_a, const uint8_t* data_a, uint32_t* state_b, const uint8_t* data_b) {
  compress_portable(state_a, data_a, 1);
  compress_portable(state_b, data_b, 1);
}

constexpr Code kPortable = {compress_portable, compress_pair_portable};

Code best_code() {
#ifdef PAGED_ATTN_X86_SHA
  if (cpu_has_sha()) return {compress_x86, compress_pair_x86};
#endif
  return kPortable;
}

Code code = best_code();

}  // namespace

bool sha256_has_instructions() { return code.compress != kPortable.compress; }

bool sha256_use_instructions(bool wanted) {
  code = wanted ? best_code() : kPortable;
  return sha256_has_instructions();
}

void Sha256::compress(const uint8_t* data, size_t num_chunks) { code.compress(state_, data, num_chunks); }

void Sha256::compress_pair(Sha256& a, const uint8_t* data_a, Sha256& b, const uint8_t* data_b) {
  code.compress_pair(a.state_, data_a, b.state_, data_b);
}

Digest Sha256::finish(const uint8_t* tail, size_t size, uint64_t total_size) {
  compress(tail, size / 64);
  tail += size / 64 * 64;
  size %= 64;
  alignas(16) uint8_t last[128] = {};
  if (size > 0) std::memcpy(last, tail, size);
  last[size] = 0x80;
  const size_t end = size < 56 ? 64 : 128;
  store_big_endian(last + end - 8, static_cast<uint32_t>(total_size >> 29));
  store_big_endian(last + end - 4, static_cast<uint32_t>(total_size << 3));
  compress(last, end / 64);
  return digest();
}

Digest Sha256::digest() const {
  uint32_t words[8];
  for (int i = 0; i < 8; ++i) words[i] = swap_bytes(state_[i]);
  Digest digest;
  std::memcpy(digest.data(), words, sizeof(words));
  return digest;
}

Digest sha256(const void* data, size_t size) { return Sha256().finish(static_cast<const uint8_t*>(data), size, size); }

}  // namespace paged_attn::host
