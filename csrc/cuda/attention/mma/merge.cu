#include "merge.cuh"

#include <algorithm>

#include "../launch.h"
#include "epilogue.cuh"

namespace paged_attn::mma {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxVectors = 2;  // of four elements a lane: head_dim <= 256

// One warp merges the parts of one row, part 0 first.  part(i) is the row of part i in the partials.
template <class T, class Part>
__device__ void merge_row(const AttentionParams& p, const Partials& partials, int num_parts, Part part, int token,
                          int head) {
  const int lane = threadIdx.x % 32;
  float maximum = -INFINITY;
  for (int i = lane; i < num_parts; i += 32) maximum = fmaxf(maximum, partials.state[part(i)].x);
  for (int d = 16; d > 0; d /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, d));
  const float reference = exp2_reference(maximum);
  float sum = 0.f;
  float4 acc[kMaxVectors] = {};
#pragma unroll 4
  for (int i = 0; i < num_parts; ++i) {
    const int64_t row = part(i);
    const float2 state = partials.state[row];
    const float weight = ptx::exp2(state.x - reference);
    sum += weight * state.y;
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      const int d = v * 128 + lane * 4;
      if (d < p.head_dim) {
        const float4 o = *reinterpret_cast<const float4*>(partials.out + row * partials.row_stride + d);
        acc[v].x += weight * o.x, acc[v].y += weight * o.y, acc[v].z += weight * o.z, acc[v].w += weight * o.w;
      }
    }
  }
  const RowEnd end = finish_row(maximum, sum, p.sinks ? p.sinks + head : nullptr);
  T* out = static_cast<T*>(p.out) + token * p.out_strides.token + head * p.out_strides.head;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int d = v * 128 + lane * 4;
    if (d < p.head_dim) store_scaled(out + d, acc[v], end.output_scale);
  }
  if (p.lse && lane == 0) p.lse[int64_t{token} * p.num_heads + head] = end.lse;
}

// The rows of an item, shared out among the warps of blockIdx.y: merge(row, token, head).
template <class Merge>
__device__ void for_each_row(const Heads& heads, TileShape shape, const PlanEntry& e, int kv_head, Merge merge) {
  const int group = heads.group.value, rows = min(shape.rows, e.q_len * group - e.first_row);
  for (int r = blockIdx.y * kWarps + threadIdx.x / 32; r < rows; r += gridDim.y * kWarps) {
    const int packed = e.first_row + r, token = heads.group.quotient(packed);
    merge(r, token, kv_head * group + packed - token * group);
  }
}

// blockIdx.x is a CTA of the attention kernel; its cut item is merged.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    merge_kernel(const __grid_constant__ AttentionParams p, Heads heads, TileShape shape, Partials partials) {
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  const int cta = blockIdx.x;
  const CutItem item = partials.items[cta];
  if (item.num_parts == 0) return;
  const PlanEntry& e = item.entry;
  for_each_row(heads, shape, e, item.head, [&](int r, int token, int head) {
    auto part = [&](int i) { return partials.balanced_row(shape, cta + i, i == 0, r); };
    merge_row<T>(p, partials, item.num_parts, part, e.q_begin + token, head);
  });
}

// blockIdx.z is a KV head; blockIdx.x walks over the query tiles.  A row merges the units that hold keys it sees
// itself: those that only other rows of its tile see would add nothing.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    merge_units_kernel(const __grid_constant__ AttentionParams p, Heads heads, TileShape shape, Plan plan,
                       Partials partials) {
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  for (int i = blockIdx.x; i < *plan.num_entries; i += gridDim.x) {
    const PlanEntry e = plan.entries[i];
    const KeySpan span = key_span(p, heads, shape, e);
    const int first_unit = span.tile_begin / partials.unit_tiles;
    const int last_unit = (span.tile_end - 1) / partials.unit_tiles;
    if (first_unit == last_unit) continue;
    for_each_row(heads, shape, e, blockIdx.z, [&](int, int token, int head) {
      const int position = e.seq_len - e.q_len + token;
      const int end = p.causal ? min(position + 1, e.seq_len) : e.seq_len;
      const int begin = p.window_size > 0 ? max(0, position - p.window_size + 1) : 0;
      const int unit_keys = partials.unit_tiles * shape.keys;
      const int u0 = begin / unit_keys, u1 = max(0, end + unit_keys - 1) / unit_keys;
      auto part = [&](int k) { return partials.unit_row(p, e, token, head, u0 + k); };
      merge_row<T>(p, partials, max(0, u1 - u0), part, e.q_begin + token, head);
    });
  }
}

template <class T>
void launch(const AttentionParams& p, QueryRange range, TileShape shape, const Plan& plan, const Partials& partials,
            int num_ctas, cudaStream_t stream, bool dependent) {
  const int64_t rows = std::min<int64_t>(shape.rows, int64_t{range.max_len} * (p.num_heads / p.num_kv_heads));
  const unsigned row_blocks = static_cast<unsigned>(std::min<int64_t>(8, (rows + kWarps - 1) / kWarps));
  if (partials.unit_tiles == 0) {
    const dim3 grid(num_ctas, row_blocks);
    launch_kernel(merge_kernel<T>, grid, kWarps * 32, 0, stream, dependent, p, Heads(p), shape, partials);
  } else {
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(max_plan_entries(p, range, shape), 1024)), row_blocks,
                    p.num_kv_heads);
    launch_kernel(merge_units_kernel<T>, grid, kWarps * 32, 0, stream, dependent, p, Heads(p), shape, plan, partials);
  }
}

}  // namespace

void launch_merge(const AttentionParams& p, QueryRange range, TileShape shape, const Plan& plan,
                  const Partials& partials, int num_ctas, cudaStream_t stream, bool dependent) {
  auto run = p.dtype == DType::kFloat16    ? launch<__half>
             : p.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>
                                           : launch<float>;
  run(p, range, shape, plan, partials, num_ctas, stream, dependent);
}

}  // namespace paged_attn::mma
