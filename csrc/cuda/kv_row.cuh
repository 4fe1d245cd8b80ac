// Where a token's row lies in a cache, and how one group of lanes stores it: shared by write_kv and rope_write_kv.
#pragma once

#include "convert.cuh"

namespace paged_attn {

struct SlotPosition {
  int block, offset;  // block -1: no slot, nothing is stored
};

__device__ __forceinline__ SlotPosition locate_slot(const KvWriteParams& p, int token) {
  const int64_t index = token * p.slot_stride;
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[index]
                                         : static_cast<const int32_t*>(p.slot_mapping)[index];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return {-1, 0};
  if (slot <= UINT32_MAX) {  // 64-bit division is several times slower
    const uint32_t block = static_cast<uint32_t>(slot) / p.block_size;
    return {static_cast<int>(block), static_cast<int>(static_cast<uint32_t>(slot) - block * p.block_size)};
  }
  return {static_cast<int>(slot / p.block_size), static_cast<int>(slot % p.block_size)};
}

__device__ __forceinline__ int64_t row_offset(const BlockStrides& s, const SlotPosition& at, int head) {
  return at.block * s.block + at.offset * s.slot + head * s.head;
}

// A row of head_dim elements belongs to a group of `lanes` lanes (a power of two up to 32, inside one warp), eight
// elements a lane; lanes at or past head_dim / 8 hold none.
struct RowGroup {
  int lanes, lane;
};

inline int lanes_for(int head_dim) {
  int lanes = 1;
  while (lanes * 8 < head_dim) lanes *= 2;
  return lanes;
}

// v / divisor rounded to nearest.  One reciprocal serves all eight; the remainder corrects the quotient (Markstein
// 1990, doi:10.1147/rd.341.0111).
__device__ __forceinline__ void divide(const float (&v)[8], float divisor, float (&quotient)[8]) {
  const float magnitude = fabsf(divisor);
  if (magnitude > 0x1p-100f && magnitude < 0x1p100f) {
    const float reciprocal = 1.0f / divisor;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float q = v[i] * reciprocal, remainder = fmaf(-q, divisor, v[i]);
      quotient[i] = fabsf(q) < INFINITY ? fmaf(remainder, reciprocal, q) : q;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) quotient[i] = v[i] / divisor;
  }
}

// Quantises a lane's eight elements v of a row and stores them.  All lanes of the warp call it together.
__device__ __forceinline__ void store_quantized(const float (&v)[8], RowGroup group, bool active, uint8_t* cache,
                                                const BlockStrides& strides, bool aligned, const ScaleView& scales,
                                                const SlotPosition& at, int head, DType dtype) {
  float scale = 1.0f;
  if (scales.per_token()) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, active && fabsf(v[i]) < INFINITY ? fabsf(v[i]) : 0.0f);
    for (int step = group.lanes / 2; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const float ratio = largest / largest_finite(dtype);
    if (ratio > 0.0f) scale = ratio;
    if (at.block >= 0 && group.lane == 0) scales.data[row_offset(scales.strides, at, head)] = scale;
  } else if (scales.data != nullptr && at.block >= 0) {
    scale = scales.data[head * scales.strides.head];
  }
  if (at.block < 0 || !active) return;
  float scaled[8];
  divide(v, scale, scaled);
  store_piece(cache + row_offset(strides, at, head) + group.lane * 8, quantize(scaled, dtype), aligned);
}

}  // namespace paged_attn
