// Division by a number that the host knows, without the device's long division.
#pragma once

#include <cstdint>

namespace paged_attn {

// For dividends of 0 .. 2^31 - 1 (Granlund and Montgomery 1994, doi:10.1145/178243.178249).
struct Divisor {
  int value;
  uint32_t multiplier, shift;

  Divisor() = default;
  explicit Divisor(int d) : value(d), shift(0) {
    while (shift < 31 && (1u << shift) < static_cast<uint32_t>(d)) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ __forceinline__ int quotient(int n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

}  // namespace paged_attn
