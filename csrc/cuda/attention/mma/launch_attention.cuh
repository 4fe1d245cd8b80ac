// Launching a path: the plan, the attention kernel, the merge.  For the kernels that share schedule.cuh and merge.cuh.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "config.cuh"

namespace paged_attn::mma {

constexpr int kCtasPerSm = 2;
constexpr int kUnitTokens = 2048;  // batch_invariant: keys of a piece, for tiles of few rows

// What launch_attention needs to know of a kernel.
struct KernelShape {
  TileShape tile;
  int threads, smem_bytes, num_ctas;
  int row_stride;     // of partials
  int min_share;      // least work of a CTA, in key tiles
  bool splits_units;  // batch_invariant cuts rows into units; else a row is done in one piece
};

// Bytes in a row of pieces that one allocation holds.
class Layout {
 public:
  size_t add(size_t bytes) {
    const size_t begin = size_;
    size_ += (bytes + 255) / 256 * 256;
    return begin;
  }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

inline void launch_attention(void (*kernel)(KernelArgs), const KernelShape& shape, KernelArgs args,
                             Workspace& workspace, cudaStream_t stream, const DeviceInfo& device) {
  const AttentionParams& p = args.p;
  const int64_t capacity = static_cast<int64_t>(p.max_blocks) * p.block_size;
  Partials& partials = args.partials;
  partials = {};
  partials.row_stride = shape.row_stride;
  int64_t partial_rows = 2ll * shape.num_ctas * shape.tile.rows;
  if (p.batch_invariant) {
    partials.unit_tiles = shape.splits_units ? kUnitTokens / shape.tile.keys : 1 << 24;
    partials.max_units = shape.splits_units ? static_cast<int>((capacity + kUnitTokens - 1) / kUnitTokens) : 1;
    const int64_t by_sequence = static_cast<int64_t>(p.num_seqs) * args.range.max_len;
    if (by_sequence < p.num_tokens) partials.seq_tokens = args.range.max_len;
    partial_rows =
        partials.max_units > 1 ? std::min<int64_t>(by_sequence, p.num_tokens) * p.num_heads * partials.max_units : 0;
  }
  Layout layout;
  const size_t count = layout.add(sizeof(int));
  const size_t entries = layout.add(sizeof(PlanEntry) * (max_plan_entries(p, shape.tile) + 1));
  const size_t items = layout.add(sizeof(CutItem) * shape.num_ctas);
  const size_t state = layout.add(sizeof(float2) * partial_rows);
  const size_t out = layout.add(sizeof(float) * partial_rows * shape.row_stride);
  auto* base = static_cast<unsigned char*>(workspace.scratch(layout.size()));
  args.plan = {reinterpret_cast<int*>(base + count), reinterpret_cast<PlanEntry*>(base + entries)};
  partials.items = reinterpret_cast<CutItem*>(base + items);
  partials.state = reinterpret_cast<float2*>(base + state);
  partials.out = reinterpret_cast<float*>(base + out);
  args.min_share = shape.min_share;

  // A kernel compiled for 8.0 has no griddepcontrol.wait: the attribute is for the 9.0 one.
  const bool dependent = p.pdl && device.major == 9;
  launch_plan(p, args.range, shape.tile, args.plan, stream, dependent);
  launch_kernel(kernel, shape.num_ctas, shape.threads, shape.smem_bytes, stream, dependent, args);
  if (!p.batch_invariant || partials.max_units > 1)
    launch_merge(p, shape.tile, args.plan, partials, shape.num_ctas, stream, dependent);
}

}  // namespace paged_attn::mma
