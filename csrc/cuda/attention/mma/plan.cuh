// Making the work list of a call.
#pragma once

#include <climits>

#include "../../warp.cuh"
#include "schedule.cuh"

namespace paged_attn::mma {

// The sum over the threads before this one; `total` over all.  `warp_sums` is shared memory, an element a warp.
template <int kThreads, class T>
__device__ T exclusive_scan(T value, T* warp_sums, T& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T inclusive = warp_inclusive_sum(value);
  __syncthreads();  // warp_sums may still be read by the scan before
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    const T sum = warp_sums[w];
    if (w < warp) before += sum;
    total += sum;
  }
  return before + inclusive - value;
}

// Shared memory of make_plan.
template <int kThreads>
struct PlanScratch {
  int q_begins[kThreads], q_lens[kThreads], lens[kThreads], first_tiles[kThreads];
  int warp_counts[kThreads / 32];
  int64_t warp_costs[kThreads / 32];
};

// Writes the list of a call.  All threads of one CTA: a thread takes a sequence to count its query tiles, then a query
// tile to find its sequence and its cost.
template <int kThreads>
__device__ void make_plan(const AttentionParams& p, const Heads& heads, QueryRange range, TileShape shape,
                          const Plan& plan, PlanScratch<kThreads>& scratch) {
  const int capacity = static_cast<int>(min(static_cast<int64_t>(INT_MAX), int64_t{p.max_blocks} * p.block_size));
  int entries = 0;
  int64_t cost = 0;
  for (int s0 = 0; s0 < p.num_seqs; s0 += kThreads) {
    const int s = s0 + static_cast<int>(threadIdx.x);
    int q_begin = s, q_len = 0, len = 0;
    if (s < p.num_seqs) {
      len = min(p.seq_lens[s * p.seq_lens_stride], capacity);
      if (p.cu_seqlens_q) q_begin = p.cu_seqlens_q[s * p.cu_seqlens_q_stride];
      q_len = p.cu_seqlens_q ? p.cu_seqlens_q[(s + 1) * p.cu_seqlens_q_stride] - q_begin : 1;
    }
    const bool served = len > 0 && q_len > 0 && q_len >= range.min_len && q_len <= range.max_len;
    int tiles;
    scratch.first_tiles[threadIdx.x] = exclusive_scan<kThreads>(
        served ? (q_len * heads.group.value - 1) / shape.rows + 1 : 0, scratch.warp_counts, tiles);
    scratch.q_begins[threadIdx.x] = q_begin;
    scratch.q_lens[threadIdx.x] = q_len;
    scratch.lens[threadIdx.x] = len;
    __syncthreads();
    for (int t0 = 0; t0 < tiles; t0 += kThreads) {
      const int t = t0 + static_cast<int>(threadIdx.x);
      PlanEntry e = {};
      int64_t work = 0;
      if (t < tiles) {
        int low = 0;  // the last sequence whose first tile is at or before t
        for (int step = kThreads / 2; step > 0; step /= 2)
          if (scratch.first_tiles[low + step] <= t) low += step;
        e.q_begin = scratch.q_begins[low];
        e.q_len = scratch.q_lens[low];
        e.seq_len = scratch.lens[low];
        e.seq = s0 + low;
        e.first_row = (t - scratch.first_tiles[low]) * shape.rows;
        const KeySpan span = key_span(p, heads, shape, e);
        work = int64_t{p.num_kv_heads} * (span.tile_end - span.tile_begin);
      }
      int64_t sum;
      e.begin = cost + exclusive_scan<kThreads>(work, scratch.warp_costs, sum);
      if (t < tiles) plan.entries[entries + t] = e;
      cost += sum;
    }
    entries += tiles;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    plan.entries[entries].begin = cost;
    *plan.num_entries = entries;
    if (plan.num_dealt) *plan.num_dealt = 0;
  }
}

}  // namespace paged_attn::mma
