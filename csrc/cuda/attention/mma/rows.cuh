// The softmax state and the output of the query rows of a warp, in the registers of its lanes.
#pragma once

#include "../softmax.cuh"
#include "loads.cuh"

namespace paged_attn::mma {

// How raw dot products become scores; the same for all rows of a piece.
struct ScoreRule {
  float scale;      // of a raw dot product, the key scale of the head included
  float log2_rate;  // of what the softmax sees, to log2 units
  bool modified;    // softcap, ALiBi or a key scale a token: scores are worked out before the softmax sees them
};

template <class C>
__device__ inline ScoreRule score_rule(const AttentionParams& p, int head) {
  ScoreRule rule;
  rule.scale = p.scale;
  rule.modified = p.softcap > 0.f || p.alibi_slopes;
  if constexpr (C::kQuantized) {
    rule.scale *= head_scale(p.k_scale, head);
    rule.modified |= per_token(p.k_scale);
  }
  rule.modified |= !(rule.scale > 0.f);  // a maximum of raw products would be the wrong one
  rule.log2_rate = rule.modified ? kLog2e : rule.scale * kLog2e;
  return rule;
}

// A lane holds, of every 16-row tile m, rows lane / 4 (h = 0) and lane / 4 + 8 (h = 1); of every 8 columns n, columns
// lane % 4 * 2 and the next: element [n][h * 2 + 0 or 1] of an accumulator.
template <class C>
class Rows {
 public:
  using T = typename C::Operand;
  static constexpr int kKeyTiles = C::kWarpKeys / 8, kDimTiles = C::kHeadDim / 8;

  float out[C::kRowTiles][kDimTiles][4];
  float maximum[C::kRowTiles][2];  // of what the softmax sees
  float sum[C::kRowTiles][2];      // this lane's columns alone until reduce_sum
  float value_unit;                // out is in units of this power of two (value scales a token)

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.f;
      maximum[m][0] = maximum[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.f;
    }
    value_unit = 0.f;
  }

  // Adds the warp's keys of one tile.  `query`, `keys`: shared memory of the warp's first row and first key,
  // `first_row` and `first_key` what they are.  `query_scales`: of the warp's rows.  `scales`: key scales of the warp's
  // keys, C::kKeys before their value scales. `meanwhile(step)`, 0 <= step < kHeadDim / 16, is called between the
  // matrix products.
  template <class Meanwhile>
  __device__ void add_tile(const AttentionParams& p, const Piece& piece, const ScoreRule& rule, uint32_t query,
                           uint32_t keys, int first_row, int first_key, const float* query_scales, const float* scales,
                           Meanwhile meanwhile) {
    Scores s;
    multiply_keys(s, query, keys, meanwhile);
    if constexpr (C::kScaledQuery) {
      const int row0 = threadIdx.x % 32 / 4;
      for_each_score(s, [&](float& x, int m, int h, int) { x *= query_scales[m * 16 + h * 8 + row0]; });
    }
    if (rule.modified) modify_scores(s, p, piece, rule.scale, first_row, first_key, scales);
    if (first_key < piece.span.full_begin || first_key + C::kWarpKeys > piece.span.full_end)
      mask_scores(s, p, piece, first_row, first_key);
    softmax(s, rule.log2_rate);
    if constexpr (C::kQuantized)
      if (per_token(p.v_scale)) scale_probabilities(s, scales + C::kKeys);
    multiply_values(s, keys + C::kTileBytes);
  }

  __device__ void reduce_sum() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], 1);
        sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], 2);
      }
  }

 private:
  using Scores = float[C::kRowTiles][kKeyTiles][4];

  template <class Meanwhile>
  __device__ static void multiply_keys(Scores& s, uint32_t query, uint32_t keys, Meanwhile meanwhile) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
    const int lane = threadIdx.x % 32;
    // Matrices of an x4 load.  Q: (rows 0-7 | 8-15) x (d 0-7 | 8-15), rows first.  K: d first.
    const uint32_t q0 = query + swizzled(lane % 16, lane / 16, C::kRowBytes);
    const uint32_t k0 = keys + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2, C::kRowBytes);
#pragma unroll
    for (int d = 0; d < C::kHeadDim / 16; ++d) {
      uint32_t q[C::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) ptx::ldmatrix_x4(q[m], (q0 ^ (d * 32)) + m * 16 * C::kRowBytes);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, (k0 ^ (d * 32)) + n * 8 * C::kRowBytes);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(s[m][n], q[m], k[0], k[1]);
          ptx::mma_m16n8k16<T>(s[m][n + 1], q[m], k[2], k[3]);
        }
      }
      meanwhile(d);
    }
  }

  // f(score, row tile, half, column of the warp's keys) for every score of this lane.
  template <class F>
  __device__ static void for_each_score(Scores& s, F f) {
    const int column0 = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(s[m][n][i], m, i / 2, n * 8 + column0 + i % 2);
  }

  __device__ static void modify_scores(Scores& s, const AttentionParams& p, const Piece& piece, float scale,
                                       int first_row, int first_key, const float* scales) {
    for_each_score(s, [&](float& x, int, int, int) { x *= scale; });
    if (C::kQuantized && per_token(p.k_scale))
      for_each_score(s, [&](float& x, int, int, int column) { x *= scales[column]; });
    if (p.softcap > 0.f) for_each_score(s, [&](float& x, int, int, int) { x = soft_cap(x, p.softcap); });
    if (p.alibi_slopes) {
      const int group = p.num_heads / p.num_kv_heads;
      float slopes[C::kRowTiles][2];
      int positions[C::kRowTiles][2];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int packed = piece.entry.first_row + first_row + m * 16 + h * 8 + threadIdx.x % 32 / 4;
          slopes[m][h] = p.alibi_slopes[piece.head * group + packed % group];
          positions[m][h] = piece.entry.seq_len - piece.entry.q_len + packed / group;
        }
      for_each_score(s, [&](float& x, int m, int h, int column) {
        x += slopes[m][h] * static_cast<float>(first_key + column - positions[m][h]);
      });
    }
  }

  __device__ static void mask_scores(Scores& s, const AttentionParams& p, const Piece& piece, int first_row,
                                     int first_key) {
    const int lane = threadIdx.x % 32, group = p.num_heads / p.num_kv_heads;
    const int column0 = first_key + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int packed = piece.entry.first_row + first_row + m * 16 + h * 8 + lane / 4;
        const int position = piece.entry.seq_len - piece.entry.q_len + packed / group;
        const int end = (p.causal ? min(position + 1, piece.entry.seq_len) : piece.entry.seq_len) - column0;
        const int begin = p.window_size > 0 ? position - p.window_size + 1 - column0 : INT_MIN;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i >= end || n * 8 + i < begin) s[m][n][h * 2 + i] = -INFINITY;
      }
  }

  // Scores become probabilities; out and sum follow the new maxima.
  __device__ void softmax(Scores& s, float rate) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = maximum[m][h];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) largest = fmaxf(largest, fmaxf(s[m][n][h * 2], s[m][n][h * 2 + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float reference = exp2_reference(largest) * rate;
        factor[h] = ptx::exp2(maximum[m][h] * rate - reference);
        maximum[m][h] = largest;
        float total = sum[m][h] * factor[h];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            s[m][n][h * 2 + i] = ptx::exp2(s[m][n][h * 2 + i] * rate - reference);
            total += s[m][n][h * 2 + i];
          }
        sum[m][h] = total;
      }
      if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[m][n][i] *= factor[i / 2];
      }
    }
  }

  // Value scales of the warp's keys go into the probabilities, in units that keep them in the range of T.
  __device__ void scale_probabilities(Scores& s, const float* scales) {
    const int lane = threadIdx.x % 32;
    float largest = 0.f;
    for (int i = lane; i < C::kWarpKeys; i += 32) largest = fmaxf(largest, fabsf(scales[i]));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    const float unit = __uint_as_float((__float_as_uint(largest) + 0x7fffffu) & 0x7f800000u);  // rounded up
    if (unit > value_unit) {
      const float factor = value_unit / unit;
      value_unit = unit;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[m][n][i] *= factor;
    }
    const float inverse = value_unit > 0.f ? 1.f / value_unit : 0.f;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(scales + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        s[m][n][0] *= two.x * inverse, s[m][n][1] *= two.y * inverse;
        s[m][n][2] *= two.x * inverse, s[m][n][3] *= two.y * inverse;
      }
    }
  }

  __device__ void multiply_values(const Scores& s, uint32_t values) {
    const int lane = threadIdx.x % 32;
    // Matrices of a transposing x4 load: (keys 0-7 | 8-15) x (d 0-7 | 8-15), keys first.
    const uint32_t v0 = values + swizzled(lane % 16, lane / 16, C::kRowBytes);
#pragma unroll
    for (int k = 0; k < C::kWarpKeys / 16; ++k) {
      uint32_t a[C::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = ptx::pack<T>(s[m][k * 2 + i / 2][i % 2 * 2], s[m][k * 2 + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, (v0 ^ (n * 16)) + k * 16 * C::kRowBytes);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out[m][n], a[m], v[0], v[1]);
          ptx::mma_m16n8k16<T>(out[m][n + 1], a[m], v[2], v[3]);
        }
      }
    }
  }
};

}  // namespace paged_attn::mma
