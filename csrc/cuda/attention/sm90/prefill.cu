// Hopper prefill: which calls it serves, and the parameters of its launch.
#include "prefill.h"

#include <algorithm>

#include "../launch.h"
#include "../softmax.cuh"
#include "tensor_map.h"

namespace paged_attn::sm90 {
namespace {

// The greatest power of two that divides the block size (boxes must not cross blocks) and the keys of a step, 64 at
// most (the CTAs of a pair load every other box).  At least 8, the period of the swizzle.
int box_rows(const AttentionParams& p) { return std::min(p.head_dim > 128 ? 16 : 64, p.block_size & -p.block_size); }

bool aligned(const void* pointer, const TokenStrides& s) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && s.token % 8 == 0 && s.head % 8 == 0;
}

// A stride of a dimension of one element is never used, and may be anything.
bool mappable(int64_t stride, int64_t size) {
  constexpr int64_t kMaxStride = int64_t{1} << 39;  // in elements of 2 bytes
  return size <= 1 || (stride > 0 && stride % 8 == 0 && stride < kMaxStride);
}
bool mappable(const AttentionParams& p, const void* pointer, const BlockStrides& s) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && mappable(s.slot, p.block_size) &&
         mappable(s.head, p.num_kv_heads) && mappable(s.block, p.num_blocks);
}

// Dimensions (column, slot, head, block); a box is 64 columns of some slots.  Columns past head_dim read as 0.
CUtensorMap block_map(const AttentionParams& p, const void* base, const BlockStrides& s, int rows) {
  auto bytes = [](int64_t stride, int64_t size) { return size > 1 ? static_cast<uint64_t>(stride) * 2 : 16; };
  TensorMapSpec spec;
  spec.base = base;
  spec.element_size = 2;
  spec.sizes = {static_cast<uint64_t>(p.head_dim), static_cast<uint64_t>(p.block_size),
                static_cast<uint64_t>(p.num_kv_heads), static_cast<uint64_t>(std::max<int64_t>(1, p.num_blocks)), 1};
  spec.strides = {bytes(s.slot, p.block_size), bytes(s.head, p.num_kv_heads), bytes(s.block, p.num_blocks), 16};
  spec.box = {64, static_cast<uint32_t>(rows), 1, 1, 1};
  spec.swizzle = 128;
  return tensor_map(spec);
}

template <class T>
void launch(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream) {
  if (p.attention.head_dim <= 64)
    launch_prefill_instance<T, 64>(p, maps, stream);
  else if (p.attention.head_dim <= 128)
    launch_prefill_instance<T, 128>(p, maps, stream);
  else
    launch_prefill_instance<T, 256>(p, maps, stream);
}

}  // namespace

bool prefill_supports(const AttentionParams& p) {
  const bool half_precision = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  return half_precision && p.cache_dtype == p.dtype && p.head_dim % 8 == 0 && p.head_dim <= 256 &&
         p.block_size % 8 == 0 && aligned(p.query, p.query_strides) && aligned(p.out, p.out_strides) &&
         mappable(p, p.key_cache, p.key_strides) && mappable(p, p.value_cache, p.value_strides);
}

void launch_prefill(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream) {
  PrefillParams params;
  params.attention = p;
  params.range = range;
  params.counters = static_cast<unsigned*>(workspace.marked(2 * sizeof(unsigned)));
  params.group = p.num_heads / p.num_kv_heads;
  params.box_rows = box_rows(p);
  params.scale_log2 = p.scale * kLog2e;
  params.cap_log2 = p.softcap * kLog2e;
  params.cap_rate = p.softcap > 0.f ? p.scale / p.softcap : 0.f;
  const PrefillMaps maps = {block_map(p, p.key_cache, p.key_strides, params.box_rows),
                            block_map(p, p.value_cache, p.value_strides, params.box_rows)};
  if (p.dtype == DType::kFloat16)
    launch<__half>(params, maps, stream);
  else
    launch<__nv_bfloat16>(params, maps, stream);
}

}  // namespace paged_attn::sm90
