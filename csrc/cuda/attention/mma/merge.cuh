// Partial results of items cut into pieces, and their merge in a fixed order: of few rows by the CTA that ends the
// item's last piece in time, of many by a second kernel.
//
// A partial is a tile of unnormalised fp32 output rows with their softmax states.  Where it lies:
// - Balanced cut: a CTA has two slots of shape.rows rows, 0 for a piece that continues an item, 1 for one that begins
//   it.  The parts of an item that begins in CTA b are slot 1 of b, then slot 0 of b + 1, b + 2, ...
// - batch_invariant: row (token, head) has one place a unit.
#pragma once

#include "schedule.cuh"

namespace paged_attn::mma {

struct Partials {
  float* out;      // [rows, row_stride]
  float2* state;   // [rows]
  CutItem* items;  // [CTAs]; balanced cut, second kernel
  int* arrivals;   // [CTAs], marked memory, -1 between launches; balanced cut, no second kernel: pieces that have ended
                   // of the item that begins in the CTA
  int row_stride;  // elements
  Units units;
  int max_units;   // units of the longest possible row
  int seq_tokens;  // a bound on the query tokens of a sequence, or 0: places are counted by tokens of the call

  __device__ int64_t balanced_row(TileShape shape, int cta, bool begins, int row) const {
    return (static_cast<int64_t>(cta) * 2 + begins) * shape.rows + row;
  }
  // `token` within its sequence.
  __device__ int64_t unit_row(const AttentionParams& p, const PlanEntry& e, int token, int head, int unit) const {
    const int64_t place = seq_tokens > 0 ? static_cast<int64_t>(e.seq) * seq_tokens + token : e.q_begin + token;
    return (place * p.num_heads + head) * max_units + unit;
  }
};

void launch_merge(const AttentionParams& p, QueryRange range, TileShape shape, const Plan& plan,
                  const Partials& partials, int num_ctas, cudaStream_t stream, bool dependent);

}  // namespace paged_attn::mma
