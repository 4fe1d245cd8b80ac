// The softmax state and the output of the query rows of a warp, on fp32 arithmetic: float32 queries, with a float32 or
// a quantised cache.
#pragma once

#include "epilogue.cuh"
#include "loads.cuh"
#include "score_rule.cuh"

namespace paged_attn::mma {

// A warp holds kWarpRows rows.  Warps that a piece of few rows leaves over share its rows and split the keys.  Eight
// lanes share a key; of every 32 elements of a row, lane `part` of them holds four, from part * 4 on.
template <class C>
class FmaRows {
 public:
  __device__ void begin(const Piece&) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) out_[r][i] = {0.f, 0.f, 0.f, 0.f};
      maximum_[r] = -INFINITY;
      sum_[r] = 0.f;
    }
  }

  __device__ void add_tile(const KernelArgs& args, const Piece& piece, const ScoreRule& rule, Loader<C>& loader,
                           int stage, int tile, const PieceView&) {
    const AttentionParams& p = args.p;
    const Share share(piece);
    if (share.first_row >= piece.num_rows) return;
    if (tile == piece.tile_begin) read_query(loader.query(), share.first_row);
    if constexpr (!C::kQuantized) {
      add_keys<DType::kFloat32>(args, piece, rule, loader, stage, tile, share);
    } else if (p.cache_dtype == DType::kFloat8E4M3) {
      add_keys<DType::kFloat8E4M3>(args, piece, rule, loader, stage, tile, share);
    } else if (p.cache_dtype == DType::kFloat8E5M2) {
      add_keys<DType::kFloat8E5M2>(args, piece, rule, loader, stage, tile, share);
    } else {
      add_keys<DType::kInt8>(args, piece, rule, loader, stage, tile, share);
    }
  }

  // Ends a piece.  The warps that share rows meet in `states`, float2 [kWarps][kWarpRows], and `exchange`, float
  // [kWarps][kWarpRows][kHeadDim].
  __device__ void finish(const KernelArgs& args, const Piece& piece, const ScoreRule& rule, float2* states,
                         float* exchange) {
    const AttentionParams& p = args.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Share share(piece);
    float value_scale = 1.f;
    if constexpr (C::kQuantized) value_scale = head_scale(p.v_scale, piece.head);
    if (share.first_row < piece.num_rows) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float sum = add_over_keys(sum_[r]);
        if (lane == 0) states[warp * kWarpRows + r] = make_float2(maximum_[r] * rule.log2_rate, sum);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const float4 o = {add_over_keys(out_[r][i].x) * value_scale, add_over_keys(out_[r][i].y) * value_scale,
                            add_over_keys(out_[r][i].z) * value_scale, add_over_keys(out_[r][i].w) * value_scale};
          if (lane < kKeyLanes)
            *reinterpret_cast<float4*>(exchange + (warp * kWarpRows + r) * C::kHeadDim + i * 32 + lane * 4) = o;
        }
      }
    }
    __syncthreads();
    Writer<float> writer(args, {C::kRows, C::kKeys}, piece);
    for (int row = warp; row < piece.num_rows; row += C::kWarps) {
      const int first = row / kWarpRows, place = row % kWarpRows;  // of the warps that hold it
      float maximum = -INFINITY, sum = 0.f, weights[C::kWarps];
      for (int w = first; w < C::kWarps; w += share.row_warps)
        maximum = fmaxf(maximum, states[w * kWarpRows + place].x);
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        const float2 state = states[w * kWarpRows + place];
        weights[w] = w % share.row_warps == first ? ptx::exp2(state.x - exp2_reference(maximum)) : 0.f;
        if (w % share.row_warps == first) sum += weights[w] * state.y;
      }
      writer.begin_row(row, maximum, sum, lane == 0);
#pragma unroll
      for (int d = lane * 4; d < C::kHeadDim; d += 128) {
        float4 o = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
          if (w % share.row_warps != first) continue;
          const float4 x = *reinterpret_cast<const float4*>(exchange + (w * kWarpRows + place) * C::kHeadDim + d);
          o.x += weights[w] * x.x, o.y += weights[w] * x.y, o.z += weights[w] * x.z, o.w += weights[w] * x.w;
        }
        writer.store(d, o);
      }
    }
  }

 private:
  static constexpr int kWarpRows = C::kWarpRows, kVectors = C::kHeadDim / 32, kKeyLanes = 8;
  static constexpr int kStepKeys = C::kKeys / C::kWarps;          // of a warp at a time
  static constexpr int kLaneKeys = kStepKeys / (32 / kKeyLanes);  // of a lane at a time
  using Scores = float[kLaneKeys][kWarpRows];

  // What part of a tile is this warp's: rows from first_row on, row_warps steps of keys from first_key on.
  struct Share {
    int row_warps, first_row, first_key;
    __device__ explicit Share(const Piece& piece) {
      const int warp = threadIdx.x / 32;
      row_warps = piece.num_rows <= kWarpRows ? 1 : piece.num_rows <= 2 * kWarpRows ? 2 : 4;
      first_row = warp % row_warps * kWarpRows;
      first_key = warp / row_warps * row_warps * kStepKeys;
    }
  };

  __device__ static float add_over_keys(float x) {
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
  }
  __device__ static float add_over_key_lanes(float x) {
#pragma unroll
    for (int d = 1; d < kKeyLanes; d *= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
  }
  __device__ static float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }

  // Elements i * 32 + part * 4 and the next three of a row of the cache.
  template <DType kType>
  __device__ static float4 read(const unsigned char* row, int i) {
    const int element = i * 32 + threadIdx.x % kKeyLanes * 4;
    if constexpr (kType == DType::kFloat32) {
      return *reinterpret_cast<const float4*>(row + element * 4);
    } else {
      const uint2 halves = widen4<kType>(*reinterpret_cast<const uint32_t*>(row + element));
      const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&halves.x));
      const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&halves.y));
      return {low.x, low.y, high.x, high.y};
    }
  }
  __device__ void read_query(const unsigned char* query, int first_row) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        query_[r][i] = read<DType::kFloat32>(query + (first_row + r) * C::kRowBytes, i);
  }

  template <DType kType>
  __device__ void add_keys(const KernelArgs& args, const Piece& piece, const ScoreRule& rule, Loader<C>& loader,
                           int stage, int tile, const Share& share) {
    const AttentionParams& p = args.p;
#pragma unroll 1
    for (int step = 0; step < share.row_warps; ++step) {
      const int key0 = share.first_key + step * kStepKeys + threadIdx.x % 32 / kKeyLanes;
      const unsigned char* keys = loader.stage_data(stage) + key0 * C::kCacheRowBytes;
      Scores s;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) s[j][r] = 0.f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const float4 key = read<kType>(keys + j * 4 * C::kCacheRowBytes, i);
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) s[j][r] = dot(query_[r][i], key, s[j][r]);
        }
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) s[j][r] = add_over_key_lanes(s[j][r]);
      }
      const int first_key = tile * C::kKeys + share.first_key + step * kStepKeys;
      if (rule.modified)
        modify_scores(s, args, piece, rule.scale, share.first_row, tile * C::kKeys, key0, loader.scales(stage));
      if (first_key < piece.span.full_begin || first_key + kStepKeys > piece.span.full_end)
        mask_scores(s, args, piece, share.first_row, tile * C::kKeys + key0);
      softmax(s, rule.log2_rate);
      if constexpr (C::kQuantized)
        if (p.v_scale.per_token())
          for_each_score(s, [&](float& x, int j, int) { x *= loader.scales(stage)[C::kKeys + key0 + j * 4]; });
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j)
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const float4 value = read<kType>(keys + C::kStageBytes / 2 + j * 4 * C::kCacheRowBytes, i);
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) {
            out_[r][i].x = fmaf(s[j][r], value.x, out_[r][i].x), out_[r][i].y = fmaf(s[j][r], value.y, out_[r][i].y);
            out_[r][i].z = fmaf(s[j][r], value.z, out_[r][i].z), out_[r][i].w = fmaf(s[j][r], value.w, out_[r][i].w);
          }
        }
    }
  }

  // f(score, key of the lane, row)
  template <class F>
  __device__ static void for_each_score(Scores& s, F f) {
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j)
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) f(s[j][r], j, r);
  }

  __device__ static void modify_scores(Scores& s, const KernelArgs& args, const Piece& piece, float scale,
                                       int first_row, int tile_key, int key0, const float* scales) {
    const AttentionParams& p = args.p;
    for_each_score(s, [&](float& x, int, int) { x *= scale; });
    if (C::kQuantized && p.k_scale.per_token())
      for_each_score(s, [&](float& x, int j, int) { x *= scales[key0 + j * 4]; });
    if (p.softcap > 0.f) for_each_score(s, [&](float& x, int, int) { x = p.softcap * tanhf(x / p.softcap); });
    if (p.alibi_slopes)
      for_each_score(s, [&](float& x, int j, int r) {
        const RowPlace row(args, piece, first_row + r);
        x += p.alibi_slopes[row.head] * static_cast<float>(tile_key + key0 + j * 4 - row.position);
      });
  }

  __device__ static void mask_scores(Scores& s, const KernelArgs& args, const Piece& piece, int first_row,
                                     int first_key) {
    for_each_score(s, [&](float& x, int j, int r) {
      const RowPlace row(args, piece, first_row + r);
      const int key = first_key + j * 4;
      if (key < row.key_begin || key >= row.key_end) x = -INFINITY;
    });
  }

  // Scores become probabilities; out and sum follow the new maxima.
  __device__ void softmax(Scores& s, float rate) {
    float largest[kWarpRows];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      largest[r] = s[0][r];
#pragma unroll
      for (int j = 1; j < kLaneKeys; ++j) largest[r] = fmaxf(largest[r], s[j][r]);
      grows |= largest[r] > maximum_[r];
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        float x = fmaxf(largest[r], maximum_[r]);
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
        const float factor = ptx::exp2((maximum_[r] - exp2_reference(x)) * rate);
        maximum_[r] = x;
        sum_[r] *= factor;
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
          out_[r][i].x *= factor, out_[r][i].y *= factor, out_[r][i].z *= factor, out_[r][i].w *= factor;
      }
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        s[j][r] = ptx::exp2((s[j][r] - exp2_reference(maximum_[r])) * rate);
        sum_[r] += s[j][r];
      }
  }

  float4 query_[kWarpRows][kVectors];
  float4 out_[kWarpRows][kVectors];  // of this lane's keys alone
  float maximum_[kWarpRows];         // of what the softmax sees, over the warp's keys
  float sum_[kWarpRows];             // of this lane's keys alone
};

}  // namespace paged_attn::mma
