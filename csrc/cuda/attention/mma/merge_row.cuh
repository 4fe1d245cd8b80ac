// Adding the parts of a query row.
#pragma once

#include "epilogue.cuh"

namespace paged_attn::mma {

// One warp merges the parts of one row, part 0 first.  part(i) is the row of part i in the partials.  kVectors: of four
// elements a lane, at least p.head_dim in all.  kBatch: parts that are read at once.
template <class T, int kVectors, int kBatch, class Part>
__device__ void merge_row(const AttentionParams& p, const Partials& partials, int num_parts, Part part, int token,
                          int head) {
  const int lane = threadIdx.x % 32;
  float maximum = -INFINITY, sum = 0.f;
  float4 acc[kVectors] = {};
#pragma unroll 1
  for (int i0 = 0; i0 < num_parts; i0 += kBatch) {
    float2 states[kBatch];
    float4 rows[kBatch][kVectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      states[i] = make_float2(-INFINITY, 0.f);
      if (i0 + i >= num_parts) continue;
      const int64_t row = part(i0 + i);
      states[i] = __ldcg(partials.state + row);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int d = v * 128 + lane * 4;
        if (d < p.head_dim)
          rows[i][v] = __ldcg(reinterpret_cast<const float4*>(partials.out + row * partials.row_stride + d));
      }
    }
    float larger = maximum;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) larger = fmaxf(larger, states[i].x);
    const float reference = exp2_reference(larger), factor = ptx::exp2(maximum - reference);
    maximum = larger;
    sum *= factor;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) acc[v].x *= factor, acc[v].y *= factor, acc[v].z *= factor, acc[v].w *= factor;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i0 + i >= num_parts) continue;
      const float weight = ptx::exp2(states[i].x - reference);
      sum += weight * states[i].y;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 o = rows[i][v];
        acc[v].x += weight * o.x, acc[v].y += weight * o.y, acc[v].z += weight * o.z, acc[v].w += weight * o.w;
      }
    }
  }
  const RowEnd end = finish_row(maximum, sum, p.sinks ? p.sinks + head : nullptr);
  T* out = static_cast<T*>(p.out) + token * p.out_strides.token + head * p.out_strides.head;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int d = v * 128 + lane * 4;
    if (d < p.head_dim) store_scaled(out + d, acc[v], end.output_scale);
  }
  if (p.lse && lane == 0) p.lse[int64_t{token} * p.num_heads + head] = end.lse;
}

// The rows of an item that warp `warp` of `num_warps` takes: merge(row, token, head).
template <class Merge>
__device__ void for_each_row(const Heads& heads, TileShape shape, const PlanEntry& e, int kv_head, int warp,
                             int num_warps, Merge merge) {
  const int group = heads.group.value, rows = min(shape.rows, e.q_len * group - e.first_row);
  for (int r = warp; r < rows; r += num_warps) {
    const int packed = e.first_row + r, token = heads.group.quotient(packed);
    merge(r, token, kv_head * group + packed - token * group);
  }
}

}  // namespace paged_attn::mma
