// Launches one instance of the decode kernel.
#pragma once

#include <numeric>

#include "../launch.h"
#include "decode_kernel.h"
#include "tensor_map.h"

namespace paged_attn::sm90 {

// Dimensions: kSwizzle bytes of a row, slot, chunk of the row, head, block; NHD and HND differ in strides alone.
// kBlockLines: 128 bytes of the block, as many of them as there are, 1, head, block.  kTokenLines: 128 bytes of kHeads
// heads, as many of them as there are, slot, heads, block.
template <class Traits>
CUtensorMap cache_map(const void* base, const AttentionParams& p, const BlockStrides& strides, int box_tokens) {
  constexpr int kElement = sizeof(typename Traits::Cache);
  const auto bytes = [](int64_t stride, int64_t size) {  // a dimension of size 1 may have any stride, even 0
    return static_cast<uint64_t>(size == 1 ? 16 : stride * kElement);
  };
  TensorMapSpec spec;
  spec.base = base, spec.element_size = kElement, spec.swizzle = Traits::kSwizzle;
  constexpr uint32_t chunk = Traits::kSwizzle / kElement;
  spec.sizes = {chunk, static_cast<uint64_t>(p.block_size), Traits::kChunks, static_cast<uint64_t>(p.num_kv_heads),
                static_cast<uint64_t>(p.num_blocks)};
  spec.strides = {bytes(strides.slot, p.block_size), Traits::kSwizzle, bytes(strides.head, p.num_kv_heads),
                  bytes(strides.block, p.num_blocks)};
  spec.box = {chunk, static_cast<uint32_t>(box_tokens), Traits::kChunks, Traits::kHeads, 1};
  if (Traits::kRowOrder == RowOrder::kTokenLines) {
    constexpr int kLines = Traits::kTokenPitch / 128;
    const int head_groups = p.num_kv_heads / Traits::kHeads;
    spec.sizes = {chunk, kLines, spec.sizes[1], static_cast<uint64_t>(head_groups), spec.sizes[4]};
    spec.strides = {128, spec.strides[0], bytes(strides.head * Traits::kHeads, head_groups), spec.strides[3]};
    spec.box = {chunk, kLines, spec.box[1], 1, 1};
  }
  if (Traits::kRowOrder == RowOrder::kBlockLines) {
    spec.sizes[1] = spec.sizes[1] * Traits::kRowBytes / 128, spec.sizes[2] = 1, spec.strides[0] = 128;
    spec.box[1] = spec.box[1] * Traits::kRowBytes / 128, spec.box[2] = 1;
  }
  return tensor_map(spec);
}

template <class Traits>
void launch(DecodeArgs& a, Workspace& workspace, cudaStream_t stream) {
  const AttentionParams& p = a.p;
  const int num_ctas = current_device().sm_count;
  const auto log2 = [](int x) { return 31 - __builtin_clz(x); };
  const int box_tokens = p.block_size < Traits::kTileTokens ? p.block_size : Traits::kTileTokens;
  a.box_shift = log2(box_tokens), a.block_shift = log2(p.block_size);
  a.group_inverse = 65536u / a.group + 1;
  a.modified_scores = p.softcap > 0.f || p.alibi_slopes != nullptr;
  const auto adjacent = [](const ScaleView& s) {
    return reinterpret_cast<uintptr_t>(s.data) % 16 == 0 && s.strides.slot == 1 && s.strides.block % 4 == 0 &&
           s.strides.head % 4 == 0;
  };
  a.adjacent_scales = adjacent(p.k_scale) && adjacent(p.v_scale);
  // With little to read latency decides, and that suffers where neighbours read the same blocks.
  constexpr int kColumnsFrom = Traits::kQuantized ? 24 : 8;  // sequences
  constexpr int64_t kMuch = 64 * 1024;                       // keys, as far as the host knows
  const bool much =
      p.num_seqs >= kColumnsFrom || (!Traits::kQuantized && int64_t{p.num_seqs} * p.max_blocks * p.block_size >= kMuch);
  const int head_groups = p.num_kv_heads / Traits::kHeads, columns = std::gcd(num_ctas, head_groups);
  a.columns = much && columns < num_ctas && !a.range.side_by_side ? columns : 1;
  a.column_ctas = num_ctas / a.columns, a.column_head_groups = head_groups / a.columns;
  a.columns_inverse = 65536u / a.columns + 1;
  a.ctas_inverse = static_cast<unsigned>((uint64_t{1} << 32) / a.column_ctas) + 1;
  a.seq_lens_stride = static_cast<int>(p.seq_lens_stride);
  a.cu_seqlens_q_stride = static_cast<int>(p.cu_seqlens_q_stride);
  a.min_share = (128 + Traits::kTileTokens - 1) / Traits::kTileTokens;
  const size_t slots = size_t{2} * num_ctas * (p.batch_invariant ? kMaxParts : 1);
  const size_t rows = slots * Traits::kHeads * Traits::kRows;
  a.partial_out = static_cast<float*>(workspace.marked(rows * (Traits::kHeadDim + 2) * sizeof(float)));
  a.partial_stats = reinterpret_cast<float2*>(a.partial_out + rows * Traits::kHeadDim);

  launch_kernel(decode_kernel<Traits>, num_ctas, Traits::kThreads, Traits::kSharedBytes, stream, p.pdl,
                cache_map<Traits>(p.key_cache, p, p.key_strides, box_tokens),
                cache_map<Traits>(p.value_cache, p, p.value_strides, box_tokens), a);
}

}  // namespace paged_attn::sm90
