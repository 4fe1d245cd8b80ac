// Tensor maps for the copy engine (TMA), encoded on the host and remembered.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace paged_attn::sm90 {

// A view of five dimensions, the innermost first, and the box of it that one copy moves to shared memory.
struct TensorMapSpec {
  const void* base;                 // 16-byte aligned
  int element_size;                 // 1 or 2 bytes
  std::array<uint64_t, 5> sizes;    // in elements
  std::array<uint64_t, 4> strides;  // in bytes, of dimensions 1 to 4; multiples of 16
  std::array<uint32_t, 5> box;      // in elements, each at most 256
  int swizzle;                      // 32, 64 or 128 bytes: the size of the box's innermost dimension

  bool operator==(const TensorMapSpec& o) const {
    return base == o.base && element_size == o.element_size && sizes == o.sizes && strides == o.strides &&
           box == o.box && swizzle == o.swizzle;
  }
};

// The map of `spec`.  Encoded once for equal specs: a map holds addresses and shapes, nothing of the contents, so it
// stays valid for whatever lies at that address later.  Thread-safe.  Throws std::runtime_error where the driver
// refuses.
CUtensorMap tensor_map(const TensorMapSpec& spec);

}  // namespace paged_attn::sm90
