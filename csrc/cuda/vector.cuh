// Rows in pieces of eight elements (16 bytes of a 2-byte type): vector accesses where the address allows them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../params.h"

namespace paged_attn {

// Eight elements of kElementBytes each, as they lie in memory.
template <int kElementBytes>
struct alignas(kElementBytes == 1 ? 8 : 16) Piece {
  uint32_t words[2 * kElementBytes];
};

template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = uint32_t;
};

// The first `count` elements at p, zeros after them.  `aligned`: p is a multiple of the alignment of the piece.
template <int kElementBytes>
__device__ __forceinline__ Piece<kElementBytes> load_piece(const void* p, bool aligned, int count = 8) {
  using Element = typename UnsignedOf<kElementBytes>::type;
  constexpr int kPerWord = 4 / kElementBytes;
  if (aligned && count == 8) return *static_cast<const Piece<kElementBytes>*>(p);
  Piece<kElementBytes> piece = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= count) continue;
    const uint32_t element = static_cast<const Element*>(p)[i];
    piece.words[i / kPerWord] |= element << (i % kPerWord * kElementBytes * 8);
  }
  return piece;
}

template <int kElementBytes>
__device__ __forceinline__ void store_piece(void* p, const Piece<kElementBytes>& piece, bool aligned, int count = 8) {
  using Element = typename UnsignedOf<kElementBytes>::type;
  constexpr int kPerWord = 4 / kElementBytes;
  if (aligned && count == 8) {
    *static_cast<Piece<kElementBytes>*>(p) = piece;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count)
        static_cast<Element*>(p)[i] =
            static_cast<Element>(piece.words[i / kPerWord] >> (i % kPerWord * kElementBytes * 8));
  }
}

// Two pieces side by side at a multiple of 16 bytes.
__device__ __forceinline__ void store_pieces(void* p, const Piece<1> (&pieces)[2]) {
  *static_cast<uint4*>(p) = make_uint4(pieces[0].words[0], pieces[0].words[1], pieces[1].words[0], pieces[1].words[1]);
}

inline bool is_aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Whether every row begins at a multiple of the alignment of a piece of its type.
inline bool rows_aligned(const void* p, TokenStrides s, DType dtype) {
  const int size = element_size(dtype), bytes = size == 1 ? 8 : 16;
  return is_aligned(p, bytes) && s.token * size % bytes == 0 && s.head * size % bytes == 0;
}
inline bool rows_aligned(const void* p, BlockStrides s, DType dtype) {
  return rows_aligned(p, TokenStrides{s.block, s.head}, dtype) && rows_aligned(p, TokenStrides{s.slot, s.head}, dtype);
}

}  // namespace paged_attn
