// The math of one warp on its tokens of a stage, 16 or twice 16.  Operands are swapped: S^T = K Q^T has tokens on M and
// query rows on N = 8, so a group of 4 wastes half an mma instead of three quarters; O^T = V^T P^T has the head
// dimension on M. Every warp keeps a maximum and a sum of its own; warps meet once a piece.
//
// 8-bit caches: both products run in fp16, where every 8-bit value is exact; scales are folded into the softmax and the
// output.  A value scale per token goes into P, after its sum was taken, in units of the largest that the warp has met,
// so that fp16 holds it.  The k slots {2t, 2t + 1, 2t + 8, 2t + 9} of an mma stand for the columns 4t .. 4t + 3 of K,
// as they lie.
#pragma once

#include "../widen.cuh"
#include "decode_merge.h"

namespace paged_attn::sm90 {

// The bytes kLow and kHigh of x to two fp16, exactly.
template <class Cache, int kLow, int kHigh>
__device__ __forceinline__ uint32_t widen(uint32_t x) {
  if constexpr (std::is_same_v<Cache, __nv_fp8_e4m3>) {
    static_assert(kLow % 2 == 0 && kHigh == kLow + 1);
    uint32_t d;
    if constexpr (kLow == 2)
      asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(d) : "r"(x));
    else
      asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(d) : "r"(x));
    return d;
  } else if constexpr (std::is_same_v<Cache, __nv_fp8_e5m2>) {  // the upper byte of an fp16
    return __byte_perm(x, 0, kHigh << 12 | kLow << 4 | 0x404);
  } else {  // int8: 0x6400 | (x + 128) is the fp16 number 1024 + 128 + x
    const uint32_t biased = __byte_perm(x ^ 0x80808080u, 0x64646464u, kHigh << 8 | kLow | 0x4040);
    const __half2 y = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6480)));
    return *reinterpret_cast<const uint32_t*>(&y);
  }
}
// Two columns of a token, then of the next, to the first column of both and the second of both.
template <class Cache>
__device__ __forceinline__ void widen_columns(uint32_t x, uint32_t& first, uint32_t& second) {
  if constexpr (std::is_same_v<Cache, __nv_fp8_e4m3>) {
    x = __byte_perm(x, 0, 0x3120);
    first = widen<Cache, 0, 1>(x), second = widen<Cache, 2, 3>(x);
  } else {
    first = widen<Cache, 0, 2>(x), second = widen<Cache, 1, 3>(x);
  }
}

// Where a lane reads: byte offsets into a stage and a query buffer.
template <class Traits>
struct LaneMap {
  uint32_t key, value;  // row and swizzled 16-byte piece of ldmatrix, for the first 32 bytes of a row
  uint32_t query[Traits::kRowTiles];
  uint32_t chunk_stride, tile_stride;  // of chunks, and of 16 tokens

  __device__ __forceinline__ static uint32_t piece(uint32_t row, uint32_t column) {  // TMA's swizzle
    if (Traits::kInLines) return column * 16;                                        // see step
    const uint32_t mask = Traits::kSwizzle / 16 - 1;
    return (column ^ (row * Traits::kSwizzle / 128 & mask)) * 16;
  }
  // `token` of the tile, `head` slot of the stage.
  __device__ __forceinline__ static uint32_t row_offset(const DecodeArgs& a, int head, int token) {
    const int box = token >> a.box_shift, row = token & ((1 << a.box_shift) - 1);
    const int head_offset = Traits::kRowOrder == RowOrder::kTokenLines ? head : head << a.box_shift;
    return ((box * Traits::kHeads << a.box_shift) + head_offset) * Traits::kRowBytes + row * Traits::kTokenPitch;
  }
  __device__ __forceinline__ LaneMap(const DecodeArgs& a, int head, int first_token) {
    const int lane = threadIdx.x % 32;
    // Matrices of a load.  K: (tokens 0-7 | 8-15) x (columns 0-7 | 8-15).  V, transposed: the same the other way about.
    const int key_row = (lane & 7) + (lane >> 3 & 1) * 8, value_row = (lane & 7) + (lane >> 4 & 1) * 8;
    key = row_offset(a, head, first_token + key_row) + piece(key_row, lane >> 4);
    value = Traits::kTensorBytes + row_offset(a, head, first_token + value_row) + piece(value_row, lane >> 3 & 1);
    chunk_stride = Traits::kSwizzle << a.box_shift;
    tile_stride = 16 * (a.box_shift > 4 ? Traits::kTokenPitch : Traits::kHeads * Traits::kRowBytes);
  }
  // Rows past the last repeat it, so that nothing uninitialised is computed with.
  __device__ __forceinline__ void set_rows(int head, int first_row, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < Traits::kRowTiles; j++) {
      const int row = min(first_row + j * 8 + (Traits::kQuantized ? lane / 4 : lane & 7), rows - 1);
      query[j] =
          (head * Traits::kRows + row) * Traits::kQueryPitch + (Traits::kQuantized ? lane % 4 * 8 : (lane >> 3) * 16);
    }
  }
  // The 32 bytes number `step` of the row, given the address of the first.
  __device__ __forceinline__ uint32_t step(uint32_t address, int step) const {
    if (Traits::kInLines) return (address + step * 32) ^ ((address + step * 32) >> 3 & 0x70);
    constexpr int kSteps = Traits::kSwizzle / 32;
    return (address ^ (step % kSteps * 32)) + step / kSteps * chunk_stride;
  }
};

// B fragments of Q^T for the columns 32 i .. 32 i + 31 of row tile j.
template <class Traits>
__device__ __forceinline__ void load_query_fragment(const DecodeArgs& a, uint32_t (&q)[4], uint32_t address, int i) {
  if constexpr (Traits::kQuantized) {
    const bool is_bfloat = Traits::kQueryInRegisters && a.p.dtype == DType::kBFloat16;  // else Consumer::convert_query
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint2 x = ptx::load_shared_v2(address + i * 64 + k * 32);
      q[k * 2] = to_half2(x.x, is_bfloat), q[k * 2 + 1] = to_half2(x.y, is_bfloat);
    }
  } else {
    ptx::ldmatrix_x4(q, address + i * 64);
  }
}

// What the keys of a tile mean to the query rows of a piece.
struct Visibility {
  int first_key, len;  // keys outside are unwritten or belong to nobody: their V must not be touched
  int first_row_end;   // query token i sees keys below first_row_end + causal * i
  int window;          // and at or above that - window
  int first_position;  // of the first query token
  int last_row_begin;  // every row sees the keys from last_row_begin to first_row_end - 1
  bool causal;

  __device__ __forceinline__ Visibility(const DecodeArgs& a, const Sequence& s) {
    first_key = s.first_key, len = s.len, causal = a.p.causal, window = a.window;
    first_position = s.len - s.query_len;
    first_row_end = causal ? first_position + 1 : s.len;
    last_row_begin = max(0, s.len - window);
  }
};

// The state of a warp's query rows over the tokens it has seen.
template <class Traits>
struct SoftmaxState {
  static constexpr int kRowTiles = Traits::kRowTiles, kDimTiles = Traits::kHeadDim / 16;
  float o[kRowTiles][kDimTiles][4];  // O^T: columns on M, rows 2t and 2t + 1 on N
  float sum[kRowTiles][4];           // [0] and [1]: of rows 2t and 2t + 1; kTokenScales: of the lane's tokens alone
  float max[kRowTiles][2];
  float inverse_unit;  // kTokenScales: the output is in units of the largest value scale so far

  __device__ __forceinline__ void clear() {
    inverse_unit = 0x1p60f;
#pragma unroll
    for (int j = 0; j < kRowTiles; j++) {
      max[j][0] = max[j][1] = kNoMaximum;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[j][i] = 0.f;
#pragma unroll
        for (int m = 0; m < kDimTiles; m++) o[j][m][i] = 0.f;
      }
    }
  }
};

// Scores in log2 units, from raw products: scale, soft cap, ALiBi, masks, in this order.  `scale_log2`: of the tokens g
// and g + 8.
template <class Traits>
__device__ __forceinline__ void finish_scores(const DecodeArgs& a, float (&c)[Traits::kRowTiles][4],
                                              const float (&scale_log2)[2], const RowMap& rows, int first_row,
                                              int first_token, const Visibility& see) {
  const AttentionParams& p = a.p;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < Traits::kRowTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[j][i] *= scale_log2[i / 2];
  const bool masked = first_token + 16 > see.first_row_end || first_token < see.last_row_begin;
  if (!masked && !a.modified_scores) return;  // one branch on the way of most tiles
  if (p.softcap > 0.f) {
#pragma unroll
    for (int j = 0; j < Traits::kRowTiles; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[j][i] = soft_cap(c[j][i] * kLn2, p.softcap) * kLog2e;
  }
  if (p.alibi_slopes) {
#pragma unroll
    for (int j = 0; j < Traits::kRowTiles; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = first_row + j * 8 + t * 2 + e, token = rows.token(row);
        const float slope = __ldg(p.alibi_slopes + rows.kv_head * a.group + row - token * a.group) * kLog2e;
        const int distance = first_token + g - (see.first_position + token);
        c[j][e] += slope * distance;
        c[j][e + 2] += slope * (distance + 8);
      }
  }
  if (masked) {
#pragma unroll
    for (int j = 0; j < Traits::kRowTiles; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int end = min(see.len, see.first_row_end + (see.causal ? rows.token(first_row + j * 8 + t * 2 + e) : 0));
        const int begin = end - see.window;
        const int key = first_token + g;
        if (key >= end || key < begin) c[j][e] = -INFINITY;
        if (key + 8 >= end || key + 8 < begin) c[j][e + 2] = -INFINITY;
      }
  }
}

// Adds the tokens of a warp, from `first_token` on, to the state.  `stage`: address of the ring's stage; `scales`: of
// the scales of its keys; `score_scale`: of all scores, in log2 units; `q`: fragments of all queries if they fit the
// registers, else `query_buffer` is read again.
template <class Traits>
__device__ __forceinline__ void attend(const DecodeArgs& a, SoftmaxState<Traits>& x, const LaneMap<Traits>& lanes,
                                       uint32_t stage, uint32_t scales, uint32_t query_buffer,
                                       const uint32_t (&q)[Traits::kRowTiles][Traits::kQuerySteps][4],
                                       float score_scale, const RowMap& rows, int first_row, int first_token,
                                       const Visibility& see) {
  using Math = typename Traits::Math;
  using Cache = typename Traits::Cache;
  constexpr int kRowTiles = Traits::kRowTiles, kDim = Traits::kHeadDim, kTokenTiles = Traits::kTokenTiles;
  // Independent sums, so that an mma need not wait for the one before.
  constexpr int kChains = kRowTiles * kTokenTiles == 1 ? 2 : 1;

  // Tokens of this tile that are keys of the sequence; the others may hold NaN.
  const int begin = see.first_key - first_token, end = see.len - first_token;
  const bool whole_tile = begin <= 0 && end >= 16 * kTokenTiles;
  const int g = threadIdx.x % 32 / 4;
  float c[kTokenTiles][kRowTiles][4] = {}, c1[4] = {};
#pragma unroll
  for (int i = 0; i < Traits::kQuerySteps; i++) {
    const bool whole = kDim % 32 == 0 || i < kDim / 32;  // else 16 columns are left
    uint32_t a0[kTokenTiles][4], a1[kTokenTiles][4];
#pragma unroll
    for (int u = 0; u < kTokenTiles; u++) {
      const uint32_t key = stage + lanes.key + u * lanes.tile_stride;
      if constexpr (Traits::kQuantized) {
        uint32_t r[4];
        ptx::ldmatrix_x4(r, lanes.step(key, i));
        a0[u][0] = widen<Cache, 0, 1>(r[0]), a0[u][1] = widen<Cache, 0, 1>(r[1]);
        a0[u][2] = widen<Cache, 2, 3>(r[0]), a0[u][3] = widen<Cache, 2, 3>(r[1]);
        a1[u][0] = widen<Cache, 0, 1>(r[2]), a1[u][1] = widen<Cache, 0, 1>(r[3]);
        a1[u][2] = widen<Cache, 2, 3>(r[2]), a1[u][3] = widen<Cache, 2, 3>(r[3]);
      } else {
        ptx::ldmatrix_x4(a0[u], lanes.step(key, 2 * i));
        if (whole) ptx::ldmatrix_x4(a1[u], lanes.step(key, 2 * i + 1));
      }
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; j++) {
      uint32_t b[4];
      if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
        for (int k = 0; k < 4; k++) b[k] = q[j][i][k];
      } else {
        load_query_fragment<Traits>(a, b, query_buffer + lanes.query[j], i);
      }
#pragma unroll
      for (int u = 0; u < kTokenTiles; u++) {
        ptx::mma_m16n8k16<Math>(c[u][j], a0[u], b[0], b[1]);
        if (whole) ptx::mma_m16n8k16<Math>(kChains == 2 ? c1 : c[u][j], a1[u], b[2], b[3]);
      }
    }
  }
  if constexpr (kChains == 2) {
#pragma unroll
    for (int i = 0; i < 4; i++) c[0][0][i] += c1[i];
  }
  float weight[kTokenTiles][2] = {};  // kTokenScales: of the values of tokens g and g + 8
  float largest_weight = 1.f;
#pragma unroll
  for (int u = 0; u < kTokenTiles; u++) {
    float scale_log2[2] = {score_scale, score_scale};  // of their scores
    if constexpr (Traits::kTokenScales) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = u * 16 + g + h * 8;
        scale_log2[h] *= ptx::load_shared(scales + token * 4);
        weight[u][h] = ptx::load_shared(scales + Traits::kScaleBytes + token * 4) * x.inverse_unit;
        if (!whole_tile && (token < begin || token >= end)) weight[u][h] = 0.f;
        largest_weight = fmaxf(largest_weight, fabsf(weight[u][h]));
      }
    }
    finish_scores<Traits>(a, c[u], scale_log2, rows, first_row, first_token + u * 16, see);
  }

  // Rescale only where some maximum of the warp grows.
  bool grows = largest_weight > 1.f;
  float m[kRowTiles][2];
#pragma unroll
  for (int j = 0; j < kRowTiles; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      m[j][e] = fmaxf(c[0][j][e], c[0][j][e + 2]);
#pragma unroll
      for (int u = 1; u < kTokenTiles; u++) m[j][e] = fmaxf(m[j][e], fmaxf(c[u][j][e], c[u][j][e + 2]));
      grows |= m[j][e] > x.max[j][e];
    }
  if (__any_sync(~0u, grows)) {
    float unit_change = 1.f;
    if constexpr (Traits::kTokenScales) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) largest_weight = fmaxf(largest_weight, __shfl_xor_sync(~0u, largest_weight, d));
      unit_change = __fdividef(1.f, largest_weight);
      x.inverse_unit *= unit_change;
#pragma unroll
      for (int u = 0; u < kTokenTiles; u++) weight[u][0] *= unit_change, weight[u][1] *= unit_change;
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float y = fmaxf(m[j][e], x.max[j][e]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) y = fmaxf(y, __shfl_xor_sync(~0u, y, d));
        const float f = ptx::exp2(x.max[j][e] - y);
        x.max[j][e] = y, x.sum[j][e] *= f;
#pragma unroll
        for (int d = 0; d < kDim / 16; d++) x.o[j][d][e] *= f * unit_change, x.o[j][d][e + 2] *= f * unit_change;
      }
  }
  // P^T as the B operand; its sum over the tokens comes from one more mma, with ones for V.
  uint32_t p[kTokenTiles][kRowTiles][2];
  const uint32_t one = ptx::pack<Math>(1.f, 1.f);
  const uint32_t ones[4] = {one, one, one, one};
#pragma unroll
  for (int u = 0; u < kTokenTiles; u++)
#pragma unroll
    for (int j = 0; j < kRowTiles; j++) {
      float (&s)[4] = c[u][j];
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = ptx::exp2(s[i] - x.max[j][i & 1]);
      if constexpr (Traits::kTokenScales) {
        x.sum[j][0] += s[0] + s[2], x.sum[j][1] += s[1] + s[3];
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] *= weight[u][i / 2];
      }
      p[u][j][0] = ptx::movmatrix_trans(ptx::pack<Math>(s[0], s[1]));
      p[u][j][1] = ptx::movmatrix_trans(ptx::pack<Math>(s[2], s[3]));
      if constexpr (!Traits::kTokenScales) ptx::mma_m16n8k16<Math>(x.sum[j], ones, p[u][j][0], p[u][j][1]);
    }

  // V rows that are no key of the sequence may hold NaN, and 0 * NaN is NaN: clear them.
  const auto add_values = [&](bool clear) {
#pragma unroll
    for (int u = 0; u < kTokenTiles; u++) {
      const int k = u * 16 + threadIdx.x % 4 * 2;
      const auto keep = [&](int i) {
        return (i >= begin && i < end ? 0x0000ffffu : 0u) | (i + 1 >= begin && i + 1 < end ? 0xffff0000u : 0u);
      };
      const uint32_t low = clear ? keep(k) : 0, high = clear ? keep(k + 8) : 0;
#pragma unroll
      for (int i = 0; i < Traits::kRowBytes / 32; i++) {
        uint32_t r[4];
        ptx::ldmatrix_x4_trans(r, lanes.step(stage + lanes.value + u * lanes.tile_stride, i));
        if (clear) r[0] &= low, r[1] &= low, r[2] &= high, r[3] &= high;
        if constexpr (Traits::kQuantized) {
          uint32_t a0[4], a1[4];
#pragma unroll
          for (int k = 0; k < 2; k++) {
            widen_columns<Cache>(r[2 * k], a0[2 * k], a0[2 * k + 1]);
            widen_columns<Cache>(r[2 * k + 1], a1[2 * k], a1[2 * k + 1]);
          }
#pragma unroll
          for (int j = 0; j < kRowTiles; j++) {
            ptx::mma_m16n8k16<Math>(x.o[j][2 * i], a0, p[u][j][0], p[u][j][1]);
            ptx::mma_m16n8k16<Math>(x.o[j][2 * i + 1], a1, p[u][j][0], p[u][j][1]);
          }
        } else {
#pragma unroll
          for (int j = 0; j < kRowTiles; j++) ptx::mma_m16n8k16<Math>(x.o[j][i], r, p[u][j][0], p[u][j][1]);
        }
      }
    }
  };
  whole_tile ? add_values(false) : add_values(true);
}

}  // namespace paged_attn::sm90
