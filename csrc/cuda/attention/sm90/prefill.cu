// Hopper prefill: which calls it serves, and the parameters of its launch.
#include "prefill.h"

#include <algorithm>
#include <climits>
#include <numeric>

#include "../launch.h"
#include "../softmax.cuh"
#include "tensor_map.h"

namespace paged_attn::sm90 {
namespace {

int instance_head_dim(int head_dim) {
  for (int columns : {64, 96, 128, 192})
    if (head_dim <= columns) return columns;
  return 256;
}

// Boxes of whole rows take a map without a dimension for the head, which counts as so many parts of 64 columns instead.
bool whole_row_boxes(const AttentionParams& p) {
  return p.head_dim % 64 == 0 &&
         (p.num_kv_heads == 1 || (p.key_strides.head % 64 == 0 && p.key_strides.head == p.value_strides.head));
}

bool aligned(const void* pointer, const TokenStrides& s) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && s.token % 8 == 0 && s.head % 8 == 0;
}

// A stride of a dimension of one element is never used, and may be anything.
bool mappable(const AttentionParams& p, const void* pointer, const BlockStrides& s) {
  const auto fits = [&](int64_t stride, int64_t size) {
    const int64_t bytes = stride * element_size(p.cache_dtype);
    return size <= 1 || (bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 40);
  };
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && fits(s.slot, p.block_size) && fits(s.head, p.num_kv_heads) &&
         fits(s.block, p.num_blocks);
}

CUtensorMap block_map(const AttentionParams& p, const PrefillParams& q, const void* base, const BlockStrides& s) {
  const int element = element_size(p.cache_dtype);
  auto bytes = [&](int64_t stride, int64_t size) { return size > 1 ? static_cast<uint64_t>(stride) * element : 16; };
  const uint64_t slots = p.block_size, heads = p.num_kv_heads, blocks = std::max<int64_t>(1, p.num_blocks);
  const uint64_t slot_bytes = bytes(s.slot, p.block_size), block_bytes = bytes(s.block, p.num_blocks);
  const uint32_t rows = q.box_rows;
  TensorMapSpec spec;
  spec.base = base;
  spec.element_size = element;
  spec.swizzle = element == 1 && p.head_dim <= 64 ? 64 : 128;
  if (q.head_parts) {  // (column of a part, slot of 8, part of any head, group of 8 slots, block)
    const uint64_t parts = p.head_dim / 64;
    spec.sizes = {64, 8, (heads - 1) * q.head_parts + parts, slots / 8, blocks};
    spec.strides = {slot_bytes, 128, 8 * slot_bytes, block_bytes};
    spec.box = {64, 8, static_cast<uint32_t>(parts), rows / 8, 1};
  } else {  // (column, slot, head, block, 1): columns past head_dim read as 0
    spec.sizes = {static_cast<uint64_t>(p.head_dim), slots, heads, blocks, 1};
    spec.strides = {slot_bytes, bytes(s.head, p.num_kv_heads), block_bytes, 16};
    spec.box = {static_cast<uint32_t>(spec.swizzle / element), rows, 1, 1, 1};
  }
  return tensor_map(spec);
}

// A map of 8-bit K and V: (column, slot of 8, tensor, group of 8 slots, place), where a place is a head of a block, and
// the two tensors are as far from each other as they happen to be.
struct Pairs {
  int64_t distance;                                // bytes from K to V
  int64_t place_bytes, block_places, head_places;  // from one place, block, head to the next
  int64_t places;
};

Pairs pairs_of(const AttentionParams& p) {
  const auto stride = [](int64_t stride, int64_t size) { return size > 1 ? stride : 0; };
  const int64_t block = stride(p.key_strides.block, p.num_blocks), head = stride(p.key_strides.head, p.num_kv_heads);
  const int64_t place = std::max<int64_t>(std::gcd(block, head), 16);
  return {reinterpret_cast<intptr_t>(p.value_cache) - reinterpret_cast<intptr_t>(p.key_cache), place, block / place,
          head / place, ((p.num_blocks - 1) * block + (p.num_kv_heads - 1) * head) / place + 1};
}

bool mappable(const AttentionParams& p, const Pairs& pairs) {
  const auto equal = [](int64_t a, int64_t b, int64_t size) { return size <= 1 || a == b; };
  const BlockStrides &k = p.key_strides, &v = p.value_strides;
  return pairs.distance != 0 && std::abs(pairs.distance) < int64_t{1} << 40 && pairs.places <= INT_MAX &&
         equal(k.block, v.block, p.num_blocks) && equal(k.slot, v.slot, p.block_size) &&
         equal(k.head, v.head, p.num_kv_heads);
}

CUtensorMap pair_map(const AttentionParams& p, const PrefillParams& q, const Pairs& pairs) {
  const uint64_t slot_bytes = p.key_strides.slot;
  TensorMapSpec spec;
  spec.base = q.value_first ? p.value_cache : p.key_cache;
  spec.element_size = 1;
  spec.swizzle = p.head_dim <= 64 ? 64 : 128;
  spec.sizes = {static_cast<uint64_t>(p.head_dim), 8, 2, static_cast<uint64_t>(p.block_size / 8),
                static_cast<uint64_t>(pairs.places)};
  spec.strides = {slot_bytes, static_cast<uint64_t>(std::abs(pairs.distance)), 8 * slot_bytes,
                  static_cast<uint64_t>(pairs.place_bytes)};
  spec.box = {static_cast<uint32_t>(spec.swizzle), 8, 2, static_cast<uint32_t>(q.box_rows / 8), 1};
  return tensor_map(spec);
}

template <class T, bool kQuantized = false>
void launch(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream) {
  switch (instance_head_dim(p.attention.head_dim)) {
    case 64:
      return launch_prefill_instance<T, 64, kQuantized>(p, maps, stream);
    case 96:
      return launch_prefill_instance<T, 96, kQuantized>(p, maps, stream);
    case 128:
      return launch_prefill_instance<T, 128, kQuantized>(p, maps, stream);
    case 192:
      return launch_prefill_instance<T, 192, kQuantized>(p, maps, stream);
    default:
      return launch_prefill_instance<T, 256, kQuantized>(p, maps, stream);
  }
}

}  // namespace

bool prefill_supports(const AttentionParams& p) {
  const bool half_precision = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const auto countable = [&](const BlockStrides& s) {
    return (p.num_blocks - 1) * s.block + (p.block_size - 1) * s.slot + (p.num_kv_heads - 1) * s.head <= INT_MAX;
  };
  const bool quantized = is_quantized(p.cache_dtype) && p.block_size <= 1 << 15 &&  // TokenScales divides by it
                         countable(p.k_scale.strides) && countable(p.v_scale.strides);
  if (p.k_scale.per_token() != p.v_scale.per_token()) return false;  // one may be null, all 1
  if (p.num_blocks < 1) return false;                                // a tensor map is not empty
  return half_precision && (p.cache_dtype == p.dtype || quantized) && p.head_dim % 8 == 0 && p.head_dim <= 256 &&
         p.block_size % 8 == 0 && p.num_heads / p.num_kv_heads <= kMaxGroup && aligned(p.query, p.query_strides) &&
         aligned(p.out, p.out_strides) && mappable(p, p.key_cache, p.key_strides) &&
         mappable(p, p.value_cache, p.value_strides);
}

// PrefillParams::counters and arrivals.
size_t prefill_marked_bytes() {
  const size_t bytes = (2 + current_device().sm_count * kRowWarps) * sizeof(unsigned);
  return (bytes + 255) / 256 * 256;
}

void launch_prefill(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream) {
  PrefillParams params;
  params.attention = p;
  params.range = range;
  const bool quantized = is_quantized(p.cache_dtype), whole_rows = !quantized && whole_row_boxes(p);
  const int columns = instance_head_dim(p.head_dim), slots = current_device().sm_count;
  constexpr int kFewestKeys = 64;  // of a step
  params.counters = static_cast<unsigned*>(workspace.marked(prefill_marked_bytes()));
  params.arrivals = params.counters + 2;
  params.partials = nullptr;
  if (!p.batch_invariant && int64_t{p.max_blocks} * p.block_size > 2 * kLeastSteps * kFewestKeys)
    params.partials =
        static_cast<float4*>(workspace.scratch(sizeof(float4) * slots * kRowWarps * (columns / 8 + 1) * 32));
  params.group = p.num_heads / p.num_kv_heads;
  params.group_inverse = ((1 << 20) + params.group - 1) / params.group;
  params.by_group = Divisor(params.group);
  params.by_heads = Divisor(p.num_kv_heads);
  params.block_inverse = static_cast<uint32_t>((1ull << 32) / p.block_size + 1);
  params.head_parts = !whole_rows ? 0 : p.num_kv_heads > 1 ? static_cast<int>(p.key_strides.head / 64) : 1;
  const int most_rows = quantized ? 64 : columns == 96 ? 32 : !whole_rows ? 8 : columns > 128 ? 16 : 64;
  params.box_rows = std::min(most_rows, p.block_size & -p.block_size);
  params.scale_log2 = p.scale * kLog2e;
  params.cap_log2 = p.softcap * kLog2e;
  params.cap_rate = p.softcap > 0.f ? p.scale / p.softcap : 0.f;
  const Pairs pairs = pairs_of(p);
  params.paired = quantized && !has_score_mods(params) && !p.k_scale.per_token() && mappable(p, pairs);
  if (params.paired) {
    params.value_first = pairs.distance < 0;
    params.block_places = static_cast<int>(pairs.block_places);
    params.head_places = static_cast<int>(pairs.head_places);
    const CUtensorMap map = pair_map(p, params, pairs);
    return launch<__half, true>(params, {map, map}, stream);
  }
  const PrefillMaps maps = {block_map(p, params, p.key_cache, p.key_strides),
                            block_map(p, params, p.value_cache, p.value_strides)};
  if (quantized)
    launch<__half, true>(params, maps, stream);
  else if (p.dtype == DType::kFloat16)
    launch<__half>(params, maps, stream);
  else
    launch<__nv_bfloat16>(params, maps, stream);
}

}  // namespace paged_attn::sm90
