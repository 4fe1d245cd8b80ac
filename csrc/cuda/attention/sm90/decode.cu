// Hopper decode: which calls it serves, and the way to the right instance.
#include <algorithm>
#include <stdexcept>

#include "decode_instances.h"

namespace paged_attn::sm90 {

extern template void launch_for<__nv_bfloat16>(DecodeArgs&, Workspace&, cudaStream_t);
extern template void launch_for<__half>(DecodeArgs&, Workspace&, cudaStream_t);
extern template void launch_for<__nv_fp8_e4m3>(DecodeArgs&, Workspace&, cudaStream_t);
extern template void launch_for<__nv_fp8_e5m2>(DecodeArgs&, Workspace&, cudaStream_t);
extern template void launch_for<int8_t>(DecodeArgs&, Workspace&, cudaStream_t);

namespace {

bool aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// TMA: base and strides are multiples of 16 bytes, strides are positive and below 2^40.
bool tma_can_read(const void* base, const AttentionParams& p, const BlockStrides& s) {
  const auto fits = [&](int64_t stride, int64_t size) {
    const int64_t bytes = stride * element_size(p.cache_dtype);
    return size <= 1 || (bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 40);
  };
  return aligned(base, 16) && fits(s.slot, p.block_size) && fits(s.head, p.num_kv_heads) && fits(s.block, p.num_blocks);
}

}  // namespace

int decode_narrow_rows(const AttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads, most = most_rows(p.head_dim, is_quantized(p.cache_dtype));
  for (int rows = 8; rows <= most; rows *= 2)
    if (group <= rows) return rows;
  return 0;
}

// With batch_invariant every sequence takes the same instance, whatever the longest query of the batch: tiles of
// another size would round differently.
int decode_max_rows(const AttentionParams& p) {
  return p.batch_invariant ? decode_narrow_rows(p) : most_rows(p.head_dim, is_quantized(p.cache_dtype));
}

bool decode_supports(const AttentionParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return false;
  if (p.num_heads / p.num_kv_heads > decode_max_rows(p)) return false;
  const bool power_of_two = (p.block_size & (p.block_size - 1)) == 0;
  if (!power_of_two || p.block_size < 8 || p.block_size > 1 << 20) return false;
  if (p.num_blocks < 1 || p.num_blocks > INT32_MAX) return false;  // a tensor map is not empty
  if (p.seq_lens_stride > INT32_MAX || p.cu_seqlens_q_stride > INT32_MAX) return false;
  if (p.k_scale.per_token() != p.v_scale.per_token()) return false;
  // Queries come in bulk copies of 16 bytes, outputs leave in pieces of 8.
  if (!aligned(p.query, 16) || p.query_strides.token % 8 != 0 || p.query_strides.head % 8 != 0) return false;
  if (!aligned(p.out, 8) || p.out_strides.token % 4 != 0 || p.out_strides.head % 4 != 0) return false;
  return tma_can_read(p.key_cache, p, p.key_strides) && tma_can_read(p.value_cache, p, p.value_strides);
}

void launch_decode(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream) {
  DecodeArgs a = {};
  a.p = p, a.range = range;
  a.window = p.window_size > 0 ? p.window_size : kMaxWindow;
  a.group = p.num_heads / p.num_kv_heads;
  const int longest = p.cu_seqlens_q == nullptr ? 1 : p.max_seqlen_q > 0 ? p.max_seqlen_q : p.num_tokens;
  a.max_rows = std::max(1, std::min(longest, range.max_len)) * a.group;
  if (p.batch_invariant) a.max_rows = decode_max_rows(p);
  switch (p.cache_dtype) {
    case DType::kBFloat16:
      return launch_for<__nv_bfloat16>(a, workspace, stream);
    case DType::kFloat16:
      return launch_for<__half>(a, workspace, stream);
    case DType::kFloat8E4M3:
      return launch_for<__nv_fp8_e4m3>(a, workspace, stream);
    case DType::kFloat8E5M2:
      return launch_for<__nv_fp8_e5m2>(a, workspace, stream);
    case DType::kInt8:
      return launch_for<int8_t>(a, workspace, stream);
    case DType::kFloat32:
      break;
  }
  throw std::invalid_argument("paged_attention: no Hopper decode kernel for a float32 cache");
}

}  // namespace paged_attn::sm90
