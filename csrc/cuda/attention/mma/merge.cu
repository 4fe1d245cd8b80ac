#include "merge.cuh"

#include <algorithm>

#include "../launch.h"
#include "merge_row.cuh"

namespace paged_attn::mma {
namespace {

constexpr int kWarps = 4;
constexpr int kVectors = 2;  // of four elements a lane: head_dim <= 256

// The rows of an item are shared out among the warps of blockIdx.y.
__device__ int this_warp() { return blockIdx.y * kWarps + threadIdx.x / 32; }

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
  for_each_row(heads, shape, e, item.head, this_warp(), gridDim.y * kWarps, [&](int r, int token, int head) {
    auto part = [&](int i) { return partials.balanced_row(shape, cta + i, i == 0, r); };
    merge_row<T, kVectors, 8>(p, partials, item.num_parts, part, e.q_begin + token, head);
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
    const Units& units = partials.units;
    if (units.index(span.tile_begin) == units.index(span.tile_end - 1)) continue;
    for_each_row(heads, shape, e, blockIdx.z, this_warp(), gridDim.y * kWarps, [&](int, int token, int head) {
      const int position = e.seq_len - e.q_len + token;
      const int end = p.causal ? min(position + 1, e.seq_len) : e.seq_len;
      const int begin = p.window_size > 0 ? max(0, position - p.window_size + 1) : 0;
      const int u0 = units.index(begin / shape.keys), u1 = end > 0 ? units.index((end - 1) / shape.keys) + 1 : 0;
      auto part = [&](int k) { return partials.unit_row(p, e, token, head, u0 + k); };
      merge_row<T, kVectors, 8>(p, partials, max(0, u1 - u0), part, e.q_begin + token, head);
    });
  }
}

template <class T>
void launch(const AttentionParams& p, QueryRange range, TileShape shape, const Plan& plan, const Partials& partials,
            int num_ctas, cudaStream_t stream, bool dependent) {
  const int64_t rows = std::min<int64_t>(shape.rows, int64_t{range.max_len} * (p.num_heads / p.num_kv_heads));
  const unsigned row_blocks = static_cast<unsigned>(std::min<int64_t>(8, (rows + kWarps - 1) / kWarps));
  if (partials.units.tiles == 0) {
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
