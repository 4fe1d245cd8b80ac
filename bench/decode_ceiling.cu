// The loads of the Hopper decode kernel without its math, in the instance that the kernel takes for the call: what its
// schedule and ring reach at best.  bench/decode.py builds it: nvcc -shared, called through ctypes.
#include "../csrc/cuda/attention/sm90/decode_instances.h"

using namespace paged_attn;

namespace {

template <class Cache, int kHeads>
struct LoadsOnly : sm90::DecodeTraits<Cache, 128, 8, kHeads> {
  static constexpr bool kLoadsOnly = true;
};

struct NoWorkspace final : Workspace {
  void* scratch(size_t) override { return nullptr; }
  void* marked(size_t) override { return nullptr; }
};

template <class Cache>
void launch_loads(sm90::DecodeArgs& a, cudaStream_t stream) {
  NoWorkspace workspace;
  sm90::two_heads_a_stage(a) ? sm90::launch<LoadsOnly<Cache, 2>>(a, workspace, stream)
                             : sm90::launch<LoadsOnly<Cache, 1>>(a, workspace, stream);
}

}  // namespace

// Caches of head dimension 128, bf16 or (`bytes` 1) 8-bit, strides in elements: block, slot, head.  Returns 0, or 1
// where CUDA refuses.
extern "C" int decode_ceiling(const void* query, void* out, const void* key_cache, const void* value_cache,
                              const int32_t* block_table, const int32_t* seq_lens, int num_seqs, int num_heads,
                              int num_kv_heads, int64_t num_blocks, int block_size, int max_blocks,
                              const int64_t* strides, int bytes, cudaStream_t stream) {
  sm90::DecodeArgs a = {};
  AttentionParams& p = a.p;
  p.query = query, p.out = out, p.key_cache = key_cache, p.value_cache = value_cache;
  p.block_table = block_table, p.seq_lens = seq_lens;
  p.dtype = DType::kBFloat16, p.cache_dtype = bytes == 1 ? DType::kFloat8E4M3 : DType::kBFloat16;
  p.num_tokens = p.num_seqs = num_seqs, p.num_heads = num_heads, p.num_kv_heads = num_kv_heads, p.head_dim = 128;
  p.num_blocks = num_blocks, p.block_size = block_size, p.max_blocks = max_blocks;
  p.query_strides = {num_heads * 128, 128}, p.out_strides = p.query_strides;
  p.key_strides = p.value_strides = {strides[0], strides[1], strides[2]};
  p.block_table_stride = max_blocks, p.seq_lens_stride = 1;
  p.causal = p.pdl = p.metadata_ready = true;
  a.range = {0, 1, false};
  a.window = 1 << 30;
  a.group = a.max_rows = num_heads / num_kv_heads;
  try {
    bytes == 1 ? launch_loads<__nv_fp8_e4m3>(a, stream) : launch_loads<__nv_bfloat16>(a, stream);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
