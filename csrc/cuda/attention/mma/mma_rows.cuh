// The softmax state and the output of the query rows of a warp, on the tensor cores.
#pragma once

#include "epilogue.cuh"
#include "loads.cuh"
#include "score_rule.cuh"

namespace paged_attn::mma {

// A lane holds, of every 16-row tile m, rows lane / 4 (h = 0) and lane / 4 + 8 (h = 1); of every 8 columns n, columns
// lane % 4 * 2 and the next: element [n][h * 2 + 0 or 1] of an accumulator.
template <class C>
class MmaRows {
 public:
  __device__ void begin(const Piece&) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) out_[m][n][0] = out_[m][n][1] = out_[m][n][2] = out_[m][n][3] = 0.f;
      reference_[m][0] = reference_[m][1] = -INFINITY;
      sum_[m][0] = sum_[m][1] = 0.f;
    }
    value_unit_ = 0.f;
  }

  // Adds the warp's keys of one tile.
  __device__ void add_tile(const KernelArgs& args, const Piece& piece, const ScoreRule& rule, Loader<C>& loader,
                           int stage, int tile, const PieceView& view) {
    const AttentionParams& p = args.p;
    const int warp = threadIdx.x / 32;
    const int row0 = C::kDecode ? 0 : warp * C::kWarpRows, key0 = C::kDecode ? warp * C::kWarpKeys : 0;
    if (!C::kDecode && !C::kRing && row0 >= view.num_rows) return;
    const bool plain = view.plain(tile) && !view.modified;
    const int first_key = tile * C::kKeys + key0;
    const uint32_t keys = loader.tile_address(stage) + key0 * (C::kReadsBytes ? C::kCacheRowBytes : C::kRowBytes);
    const uint32_t values = keys + Loader<C>::kValuesBehind;
    const float* scales = loader.scales(stage) + key0;
    Scores s;
    const uint32_t query = ptx::smem_address(loader.query()) + row0 * C::kRowBytes;
    if constexpr (C::kReadsBytes)
      for_cache_type(p.cache_dtype, [&](auto type) { multiply_byte_keys<decltype(type)::value>(s, query, keys); });
    else
      multiply_keys(s, query, keys);
    if constexpr (C::kScaledQuery) {
      const float* query_scales = loader.query_scales() + row0 + threadIdx.x % 32 / 4;
      for_each_score(s, [&](float& x, int m, int h, int) { x *= query_scales[m * 16 + h * 8]; });
    }
    Maxima largest;
    find_largest(s, largest);
    if (!plain) {
      if (view.modified) modify_scores(s, args, piece, rule.scale, row0, first_key, scales);
      if (first_key < piece.span.full_begin || first_key + C::kWarpKeys > piece.span.full_end)
        mask_scores(s, args, piece, row0, first_key);
      find_largest(s, largest);
    }
    softmax(s, largest, rule.log2_rate);
    if constexpr (C::kQuantized)
      if (p.v_scale.per_token()) scale_probabilities(s, scales + C::kKeys);
    if constexpr (C::kReadsBytes)
      for_cache_type(p.cache_dtype, [&](auto type) { multiply_byte_values<decltype(type)::value>(s, values); });
    else
      multiply_values(s, values);
  }

  // Ends a piece.  Decode: the warps meet in `states`, float2 [kWarps][kRows], and, 16 rows at a time, in `exchange`,
  // float [kWarps][16][kHeadDim] with the columns of a row swizzled.
  __device__ void finish(const KernelArgs& args, const Piece& piece, const ScoreRule&, float2* states,
                         float* exchange) {
    float value_scale = 1.f;
    if constexpr (C::kQuantized)
      value_scale = args.p.v_scale.per_token() ? value_unit_ : head_scale(args.p.v_scale, piece.head);
    reduce_sum();
    if constexpr (C::kDecode)
      merge_warps_and_store(args, piece, value_scale, states, exchange);
    else
      store_rows(args, piece, value_scale);
  }

 private:
  using T = typename C::Operand;
  static constexpr int kKeyTiles = C::kWarpKeys / 8, kDimTiles = C::kHeadDim / 8;
  using Scores = float[C::kRowTiles][kKeyTiles][4];
  using Maxima = float[C::kRowTiles][2];

  __device__ static void clear(Scores& s) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
  }

  __device__ static void multiply_keys(Scores& s, uint32_t query, uint32_t keys) {
    clear(s);
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
    }
  }

  // A lane reads 16 neighbouring elements of a key, for four steps of 16 columns each.  In which order a step takes its
  // columns does not matter, as long as Q does the same.
  template <DType kType>
  __device__ static void multiply_byte_keys(Scores& s, uint32_t query, uint32_t keys) {
    clear(s);
    const int row = threadIdx.x % 32 / 4, part = threadIdx.x % 4;
#pragma unroll
    for (int chunk = 0; chunk < C::kHeadDim / 16; chunk += 4) {
      uint4 bytes[kKeyTiles];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
        bytes[n] = ptx::load_shared_v4(keys + (n * 8 + row) * C::kCacheRowBytes +
                                       ((chunk + part ^ byte_swizzle<C>(row)) << 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 q[C::kRowTiles][2];
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            q[m][h] =
                ptx::load_shared_v4(query + swizzled(m * 16 + h * 8 + row, (chunk + part) * 2 + half, C::kRowBytes));
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const uint2 k0 = widen4<kType>(half ? bytes[n].z : bytes[n].x);
          const uint2 k1 = widen4<kType>(half ? bytes[n].w : bytes[n].y);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            ptx::mma_m16n8k16<T>(s[m][n], {q[m][0].x, q[m][1].x, q[m][0].y, q[m][1].y}, k0.x, k0.y);
            ptx::mma_m16n8k16<T>(s[m][n], {q[m][0].z, q[m][1].z, q[m][0].w, q[m][1].w}, k1.x, k1.y);
          }
        }
      }
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

  __device__ static void modify_scores(Scores& s, const KernelArgs& args, const Piece& piece, float scale,
                                       int first_row, int first_key, const float* scales) {
    const AttentionParams& p = args.p;
    for_each_score(s, [&](float& x, int, int, int) { x *= scale; });
    if (C::kQuantized && p.k_scale.per_token())
      for_each_score(s, [&](float& x, int, int, int column) { x *= scales[column]; });
    if (p.softcap > 0.f) for_each_score(s, [&](float& x, int, int, int) { x = soft_cap(x, p.softcap); });
    if (p.alibi_slopes) {
      float slopes[C::kRowTiles][2];
      int positions[C::kRowTiles][2];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const RowPlace row(args, piece, first_row + m * 16 + h * 8 + threadIdx.x % 32 / 4);
          slopes[m][h] = p.alibi_slopes[row.head];
          positions[m][h] = row.position;
        }
      for_each_score(s, [&](float& x, int m, int h, int column) {
        x += slopes[m][h] * static_cast<float>(first_key + column - positions[m][h]);
      });
    }
  }

  __device__ static void mask_scores(Scores& s, const KernelArgs& args, const Piece& piece, int first_row,
                                     int first_key) {
    const int lane = threadIdx.x % 32, column0 = first_key + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowPlace row(args, piece, first_row + m * 16 + h * 8 + lane / 4);
        const int begin = row.key_begin - column0, end = row.key_end - column0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i >= end || n * 8 + i < begin) s[m][n][h * 2 + i] = -INFINITY;
      }
  }

  // Of this lane's columns.
  __device__ static void find_largest(const Scores& s, Maxima& largest) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = largest[m][h];
        x = fmaxf(s[m][0][h * 2], s[m][0][h * 2 + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) x = fmaxf(x, fmaxf(s[m][n][h * 2], s[m][n][h * 2 + 1]));
      }
  }

  // Scores become probabilities against the row's reference, its maximum: the largest is exactly 1, and rounding it to
  // T costs nothing.  16 rows none of whose maxima grows change neither out nor sum and need no lane's neighbours.
  __device__ void softmax(Scores& s, const Maxima& largest, float rate) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const bool grows = largest[m][0] * rate > reference_[m][0] || largest[m][1] * rate > reference_[m][1];
      if (!__any_sync(~0u, grows)) continue;
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = largest[m][h];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        const float reference = fmaxf(reference_[m][h], x * rate);
        factor[h] = ptx::exp2(reference_[m][h] - exp2_reference(reference));
        reference_[m][h] = reference;
        sum_[m][h] *= factor[h];
      }
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] *= factor[i / 2];
    }
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float reference = exp2_reference(reference_[m][h]);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = s[m][n][h * 2 + i];
            x = ptx::exp2(x * rate - reference);
            sum_[m][h] += x;
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
    const float unit = power_of_two_above(largest);
    if (unit > value_unit_) {
      const float factor = value_unit_ / unit;
      value_unit_ = unit;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out_[m][n][i] *= factor;
    }
    const float inverse = value_unit_ > 0.f ? 1.f / value_unit_ : 0.f;
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

  using Fragments = uint32_t[C::kRowTiles][4];
  // The probabilities of 16 keys as an operand.
  __device__ static void pack_probabilities(Fragments& a, const Scores& s, int k) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = ptx::pack<T>(s[m][k * 2 + i / 2][i % 2 * 2], s[m][k * 2 + i / 2][i % 2 * 2 + 1]);
  }

  __device__ void multiply_values(const Scores& s, uint32_t values) {
    const int lane = threadIdx.x % 32;
    // Matrices of a transposing x4 load: (keys 0-7 | 8-15) x (d 0-7 | 8-15), keys first.
    const uint32_t v0 = values + swizzled(lane % 16, lane / 16, C::kRowBytes);
#pragma unroll
    for (int k = 0; k < C::kWarpKeys / 16; ++k) {
      Fragments a;
      pack_probabilities(a, s, k);
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, (v0 ^ (n * 16)) + k * 16 * C::kRowBytes);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out_[m][n], a[m], v[0], v[1]);
          ptx::mma_m16n8k16<T>(out_[m][n + 1], a[m], v[2], v[3]);
        }
      }
    }
  }

  // ldmatrix transposes pairs of columns: a lane gets columns d and d + 1 of two keys, and gives one to either of two
  // products.  So out_ holds, of every 16 columns, in tiles 2n and 2n + 1 the even and the odd ones.
  template <DType kType>
  __device__ void multiply_byte_values(const Scores& s, uint32_t values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < C::kWarpKeys / 16; ++k) {
      Fragments a;
      pack_probabilities(a, s, k);
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 4) {
        uint32_t v[4];  // (keys 0-7 | 8-15) x (d 0-15 | 16-31), keys first
        ptx::ldmatrix_x4_trans(v, values + (k * 16 + lane % 16) * C::kCacheRowBytes +
                                      ((n / 2 + lane / 16 ^ byte_swizzle<C>(lane % 16)) << 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 low = widen4<kType>(__byte_perm(v[i * 2], 0, 0x3120));
          const uint2 high = widen4<kType>(__byte_perm(v[i * 2 + 1], 0, 0x3120));
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            ptx::mma_m16n8k16<T>(out_[m][n + i * 2], a[m], low.x, high.x);
            ptx::mma_m16n8k16<T>(out_[m][n + i * 2 + 1], a[m], low.y, high.y);
          }
        }
      }
    }
  }

  __device__ void reduce_sum() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum_[m][h] += __shfl_xor_sync(~0u, sum_[m][h], 1);
        sum_[m][h] += __shfl_xor_sync(~0u, sum_[m][h], 2);
      }
  }

  // The warps hold different rows.
  __device__ void store_rows(const KernelArgs& args, const Piece& piece, float value_scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (args.plain_output && piece.whole()) {
      store_whole_rows(args, piece, value_scale);
      return;
    }
    Writer<typename C::T> writer(args, {C::kRows, C::kKeys}, piece);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * C::kWarpRows + m * 16 + h * 8 + lane / 4;
        const bool stored = row < piece.num_rows;
        if (stored) writer.begin_row(row, reference_[m][h], sum_[m][h], lane % 4 == 0);
        // Two neighbouring lanes hold four columns of each of two column tiles; either lane takes those of one.
        const bool odd = lane % 2 == 1;
        float4 fours[kDimTiles / 2];
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
          const float2 low = {out_[m][n][h * 2] * value_scale, out_[m][n][h * 2 + 1] * value_scale};
          const float2 high = {out_[m][n + 1][h * 2] * value_scale, out_[m][n + 1][h * 2 + 1] * value_scale};
          const float x = __shfl_xor_sync(~0u, odd ? low.x : high.x, 1);
          const float y = __shfl_xor_sync(~0u, odd ? low.y : high.y, 1);
          fours[n / 2] = odd ? make_float4(x, y, high.x, high.y) : make_float4(low.x, low.y, x, y);
        }
        if (!stored) continue;
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) writer.store((n + odd) * 8 + lane % 4 / 2 * 4, fours[n / 2]);
      }
  }
  // The same, 16 bytes at once: of four column tiles, four neighbouring lanes hold two columns each, and take a tile
  // each.
  __device__ void store_whole_rows(const KernelArgs& args, const Piece& piece, float value_scale) {
    using Out = typename C::T;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * C::kWarpRows + lane / 4;
    OutputRow<Out> rows[C::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row0 + m * 16 + h * 8;
        const bool stored = row < piece.num_rows;
        const RowPlace place(args, piece, stored ? row : 0);
        rows[m][h] = output_row<Out>(args.p, piece.entry, place.token, place.head, reference_[m][h], sum_[m][h],
                                     stored && lane % 4 == 0);
      }
    const bool odd = lane % 2 == 1, high = lane % 4 >= 2;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const OutputRow<Out>& row = rows[m][h];
        const uint32_t seen = row.scale == 0.f ? 0 : ~0u;
        uint32_t pairs[kDimTiles];
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
          pairs[n] = ptx::pack<Out>(out_[m][n][h * 2] * value_scale * row.scale,
                                    out_[m][n][h * 2 + 1] * value_scale * row.scale) &
                     seen;
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 4) {
          const uint32_t x = __shfl_xor_sync(~0u, odd ? pairs[n] : pairs[n + 1], 1);
          const uint32_t y = __shfl_xor_sync(~0u, odd ? pairs[n + 2] : pairs[n + 3], 1);
          const uint2 low_tile = odd ? make_uint2(x, pairs[n + 1]) : make_uint2(pairs[n], x);
          const uint2 high_tile = odd ? make_uint2(y, pairs[n + 3]) : make_uint2(pairs[n + 2], y);
          const uint32_t z0 = __shfl_xor_sync(~0u, high ? low_tile.x : high_tile.x, 2);
          const uint32_t z1 = __shfl_xor_sync(~0u, high ? low_tile.y : high_tile.y, 2);
          if (row0 + m * 16 + h * 8 < piece.num_rows)
            *reinterpret_cast<uint4*>(row.out + (n + lane % 4) * 8) =
                high ? make_uint4(z0, z1, high_tile.x, high_tile.y) : make_uint4(low_tile.x, low_tile.y, z0, z1);
        }
      }
  }

  // The warps hold the same rows over different keys.
  __device__ void merge_warps_and_store(const KernelArgs& args, const Piece& piece, float value_scale, float2* states,
                                        float* exchange) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (lane % 4 == 0)
          states[warp * C::kRows + m * 16 + h * 8 + lane / 4] = make_float2(reference_[m][h], sum_[m][h]);
    __syncthreads();
    Writer<typename C::T> writer(args, {C::kRows, C::kKeys}, piece);
    auto maximum_of = [&](int row) {
      float maximum = states[row].x;
#pragma unroll
      for (int w = 1; w < C::kWarps; ++w) maximum = fmaxf(maximum, states[w * C::kRows + row].x);
      return maximum;
    };
    auto place = [](int w, int row, int d) { return (w * 16 + row % 16) * C::kHeadDim + (d ^ (row % 8 * 8)); };
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      if (m > 0) __syncthreads();  // the row tile before is read
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m * 16 + h * 8 + lane / 4;
        if (row >= piece.num_rows) continue;
        const float reference = exp2_reference(maximum_of(row));
        const float weight = ptx::exp2(reference_[m][h] - reference) * value_scale;
#pragma unroll
        for (int n = 0; n < kDimTiles; n += 2) {
          const float x0 = out_[m][n][h * 2] * weight, x1 = out_[m][n][h * 2 + 1] * weight;
          const float y0 = out_[m][n + 1][h * 2] * weight, y1 = out_[m][n + 1][h * 2 + 1] * weight;
          if constexpr (C::kReadsBytes) {
            *reinterpret_cast<float4*>(exchange + place(warp, row, n * 8 + lane % 4 * 4)) = make_float4(x0, y0, x1, y1);
          } else {
            *reinterpret_cast<float2*>(exchange + place(warp, row, n * 8 + lane % 4 * 2)) = make_float2(x0, x1);
            *reinterpret_cast<float2*>(exchange + place(warp, row, n * 8 + 8 + lane % 4 * 2)) = make_float2(y0, y1);
          }
        }
      }
      __syncthreads();
      constexpr int kRowThreads = C::kThreads / 16;
      const int row = m * 16 + threadIdx.x / kRowThreads, part = threadIdx.x % kRowThreads;
      if (row >= piece.num_rows) continue;
      const float maximum = maximum_of(row), reference = exp2_reference(maximum);
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        const float2 state = states[w * C::kRows + row];
        sum += state.y * ptx::exp2(state.x - reference);
      }
      writer.begin_row(row, maximum, sum, part == 0);
#pragma unroll 4
      for (int d = part * 4; d < args.p.head_dim; d += kRowThreads * 4) {
        float4 o = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
          const float4 x = *reinterpret_cast<const float4*>(exchange + place(w, row, d));
          o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w;
        }
        writer.store(d, o);
      }
    }
  }

  float out_[C::kRowTiles][kDimTiles][4];
  float reference_[C::kRowTiles][2];  // the maximum so far, in log2 units
  float sum_[C::kRowTiles][2];        // this lane's columns alone until reduce_sum
  float value_unit_;                  // out is in units of this power of two (value scales a token)
};

}  // namespace paged_attn::mma
