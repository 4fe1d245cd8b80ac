// Launching the path: the plan, the attention kernel, the merge.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "../../launch.cuh"
#include "attention_kernel.cuh"

namespace paged_attn::mma {

constexpr int kUnitTokens = 2048;  // batch_invariant: keys of the first units, for tiles of few rows

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

// The largest copy that every row allows, in bytes: 16, 8, or 1 for element by element.
inline int copy_bytes(std::initializer_list<const void*> bases, std::initializer_list<int64_t> strides,
                      int64_t row_bytes, int element_size) {
  uint64_t all = static_cast<uint64_t>(row_bytes);
  for (const void* base : bases) all |= reinterpret_cast<uintptr_t>(base);
  for (int64_t stride : strides) all |= static_cast<uint64_t>(stride * element_size);
  return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : 1;
}

// Whether 32 bits count the 16-byte chunks of a cache.
inline bool counts_in_chunks(const AttentionParams& p, const BlockStrides& bytes) {
  return (p.num_blocks * bytes.block + p.block_size * bytes.slot) / 16 <= UINT32_MAX;
}

inline KernelArgs kernel_args(const AttentionParams& p, QueryRange range) {
  KernelArgs args = {};
  args.p = p;
  args.range = range;
  args.heads = Heads(p);
  args.block = Divisor(p.block_size);
  args.last_block = static_cast<unsigned>(std::max<int64_t>(1, p.num_blocks) - 1);
  const int query_size = element_size(p.dtype), cache_size = element_size(p.cache_dtype);
  args.query_bytes =
      copy_bytes({p.query}, {p.query_strides.token, p.query_strides.head}, p.head_dim * query_size, query_size);
  args.cache_bytes = copy_bytes({p.key_cache, p.value_cache},
                                {p.key_strides.block, p.key_strides.slot, p.key_strides.head, p.value_strides.block,
                                 p.value_strides.slot, p.value_strides.head},
                                p.head_dim * cache_size, cache_size);
  auto in_bytes = [&](const BlockStrides& s) -> BlockStrides {
    return {s.block * cache_size, s.slot * cache_size, s.head * cache_size};
  };
  args.key_bytes = in_bytes(p.key_strides);
  args.value_bytes = in_bytes(p.value_strides);
  return args;
}

// Stages of the ring for `ctas` CTAs an SM; 0: too few.
template <class C>
int stages_that_fit(const DeviceInfo& device, int ctas) {
  const int bytes = std::min(device.smem_per_sm / ctas - device.smem_reserved, device.smem_per_block);
  int stages = C::kMaxStages;
  while (stages > 0 && C::smem_bytes(stages) > bytes) --stages;
  return stages < 2 ? 0 : stages;
}

// `splits_rows`: batch_invariant cuts rows into units of kUnitTokens keys and more; else a row is done in one piece.
template <class C>
void launch_attention(KernelArgs args, bool splits_rows, Workspace& workspace, cudaStream_t stream,
                      const DeviceInfo& device) {
  const AttentionParams& p = args.p;
  const TileShape tile = {C::kRows, C::kKeys};
  int ctas = C::kCtasPerSm;
  while (ctas > 1 && stages_that_fit<C>(device, ctas) == 0) --ctas;
  args.stages = stages_that_fit<C>(device, ctas);
  args.min_share = C::kDecode ? 2 : 4;
  args.deals = !splits_rows;
  args.runs_share_blocks = p.block_size % Loader<C>::kRunRows == 0;
  const bool counted = counts_in_chunks(p, args.key_bytes) && counts_in_chunks(p, args.value_bytes);
  args.plain_copies = args.cache_bytes == 16 && p.head_dim == C::kHeadDim && (args.runs_share_blocks || counted);
  const int size = element_size(p.dtype);
  args.plain_output = p.head_dim == C::kHeadDim &&
                      copy_bytes({p.out}, {p.out_strides.token, p.out_strides.head}, p.head_dim * size, size) == 16;
  if (!counted) args.cache_bytes = std::min(args.cache_bytes, 8);  // of other tiles
  // Exactly `ctas` CTAs an SM: were there room for more, a grid that starts early could double up on some SMs.
  const int smem_bytes =
      std::min(std::max(C::smem_bytes(args.stages), device.smem_per_sm / (ctas + 1)), device.smem_per_block);
  const int num_ctas = device.sm_count * ctas;

  Partials& partials = args.partials;
  partials = {};
  partials.row_stride = C::kHeadDim;
  int64_t partial_rows = 2ll * num_ctas * tile.rows;
  if (p.batch_invariant) {
    const int64_t capacity = static_cast<int64_t>(p.max_blocks) * p.block_size;
    partials.units.tiles = splits_rows ? kUnitTokens / tile.keys : 1 << 24;
    partials.max_units =
        splits_rows && capacity > 0 ? partials.units.index(static_cast<int>((capacity - 1) / tile.keys)) + 1 : 1;
    const int64_t by_sequence = static_cast<int64_t>(p.num_seqs) * args.range.max_len;
    if (by_sequence < p.num_tokens) partials.seq_tokens = args.range.max_len;
    partial_rows =
        partials.max_units > 1 ? std::min<int64_t>(by_sequence, p.num_tokens) * p.num_heads * partials.max_units : 0;
  }
  const int64_t max_entries = max_plan_entries(p, args.range, tile);
  const bool merges = p.batch_invariant ? partials.max_units > 1 : !C::kMergesItself;  // in a kernel of its own
  const bool local_plan = C::kLocalPlan && !p.batch_invariant && max_entries <= LocalPlan::kMaxEntries;
  Layout layout;
  const size_t counts = layout.add(2 * sizeof(int));
  const size_t entries = layout.add(sizeof(PlanEntry) * (local_plan ? 0 : max_entries + 1));
  const size_t items = layout.add(sizeof(CutItem) * num_ctas);
  const size_t state = layout.add(sizeof(float2) * partial_rows);
  const size_t out = layout.add(sizeof(float) * partial_rows * partials.row_stride);
  auto* base = static_cast<unsigned char*>(workspace.scratch(layout.size()));
  args.plan = {reinterpret_cast<int*>(base + counts), reinterpret_cast<int*>(base + counts) + 1,
               local_plan ? nullptr : reinterpret_cast<PlanEntry*>(base + entries)};
  partials.items = reinterpret_cast<CutItem*>(base + items);
  partials.state = reinterpret_cast<float2*>(base + state);
  if (C::kMergesItself && !p.batch_invariant)
    partials.arrivals = static_cast<int*>(workspace.marked(num_ctas * sizeof(int)));
  partials.out = reinterpret_cast<float*>(base + out);

  const bool dependent = p.pdl && device.major == 9 && waits_for_dependency(attention_kernel<C>);
  if (!local_plan) launch_plan(p, args.range, tile, args.plan, stream, dependent);
  launch_kernel(attention_kernel<C>, num_ctas, C::kThreads, smem_bytes, stream, dependent, args);
  if (merges) launch_merge(p, args.range, tile, args.plan, partials, num_ctas, stream, dependent);
}

}  // namespace paged_attn::mma
