// What a launch needs, as plain structs: raw pointers with their shapes, strides in elements.  No torch header here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged_attn {

enum class DType : int { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kInt8 };

constexpr bool is_quantized(DType dtype) { return dtype >= DType::kFloat8E4M3; }
constexpr int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : is_quantized(dtype) ? 1 : 2; }

struct TokenStrides {
  int64_t token, head;  // of [tokens, heads, head_dim]; the last stride is 1
};
struct BlockStrides {
  int64_t block, slot, head;  // of [num_blocks, block_size, num_kv_heads, head_dim]; the last stride is 1
};

// Scales of a quantised cache: element [block, slot, head] of a float32 tensor, a stride of 0 where it does not vary.
// One scale a tensor: all strides 0.  One a head: only `head` is not 0.
struct ScaleView {
  float* data;  // null: every scale is 1
  BlockStrides strides;
  constexpr bool per_token() const { return strides.slot != 0 || strides.block != 0; }
};

// Which implementation serves paged_attention; kAuto picks the fastest that can.
enum class AttentionBackend : int { kAuto = 0, kMma = 1, kSm90 = 2 };

// Larger windows are no limit: so sums with lengths stay in the range of int.
constexpr int kMaxWindow = 1 << 30;

// Larger caps would multiply the error of a float's tanh into the scores.
constexpr float kMinSoftcap = 1e-30f, kMaxSoftcap = 10000.f;

struct AttentionParams {
  const void* query;            // [num_tokens, num_heads, head_dim]
  const void* key_cache;        // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* value_cache;      // as key_cache
  const int32_t* block_table;   // [num_seqs, max_blocks], last stride 1
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]; null: one query token a sequence
  const float* alibi_slopes;    // [num_heads] or null
  const float* sinks;           // [num_heads] or null
  ScaleView k_scale, v_scale;
  void* out;   // [num_tokens, num_heads, head_dim]
  float* lse;  // [num_tokens, num_heads], contiguous; or null

  DType dtype;        // of query and out
  DType cache_dtype;  // as dtype, or a quantised type
  int num_tokens, num_seqs, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks;
  int block_size, max_blocks;
  TokenStrides query_strides, out_strides;
  BlockStrides key_strides, value_strides;
  int64_t block_table_stride, seq_lens_stride, cu_seqlens_q_stride;

  float scale;      // of the raw scores
  float softcap;    // 0: none
  int window_size;  // keys a token sees, itself included, at most kMaxWindow; 0: no limit
  bool causal;
  bool batch_invariant;
  int max_seqlen_q;  // a bound on the query tokens of a sequence, at most num_tokens; 0: unknown

  AttentionBackend backend;
  bool metadata_ready;  // block_table, seq_lens, cu_seqlens_q are final before the stream's preceding kernel starts
  bool pdl;             // programmatic dependent launch allowed
};

struct KvWriteParams {
  const void* key;           // [num_tokens, num_kv_heads, head_dim]
  const void* value;         // as key
  void* key_cache;           // [num_blocks, block_size, num_kv_heads, head_dim]
  void* value_cache;         // as key_cache
  const void* slot_mapping;  // int64 or int32 [num_tokens]; negative: skip the row
  bool slots_are_int64;
  ScaleView k_scale, v_scale;  // per token: written here, amax / largest finite value of the cache's type
  DType dtype, cache_dtype;
  int num_tokens, num_kv_heads, head_dim, block_size;
  int64_t num_blocks, slot_stride;
  TokenStrides key_strides, value_strides;
  BlockStrides key_cache_strides, value_cache_strides;
};

struct RopeWriteParams {
  KvWriteParams write;    // of the rotated keys; its num_tokens counts the slots
  void* query;            // [num_tokens, num_heads, head_dim], rotated in place
  void* key;              // write.key, rotated in place
  const void* positions;  // int64 or int32 [num_tokens]
  const void* cos_sin;    // [num_positions, rotary_dim]: cosines, then sines; of write.dtype or float32
  bool positions_are_int64, cos_sin_is_float32;
  bool interleaved;  // pairs are elements 2i and 2i + 1; else i and i + rotary_dim / 2
  int num_tokens, num_heads, rotary_dim;
  int64_t num_positions, positions_stride, cos_sin_stride;
  TokenStrides query_strides;
};

// Bytes of whole blocks, layout and dtype forgotten: a block of a cache is the same set of bytes for every block id,
// given by up to four dimensions (merged where adjacent), the innermost contiguous.
struct BlockShape {
  int64_t row_bytes;             // contiguous bytes
  int64_t sizes[3], strides[3];  // outer dimensions, strides in bytes; size 1 where unused
  constexpr int64_t bytes() const { return row_bytes * sizes[0] * sizes[1] * sizes[2]; }
};

// One cache tensor of copy_blocks or swap_blocks.
struct BlockArray {
  void* data;
  int64_t num_blocks, block_stride;  // bytes
  BlockShape shape;
};

// How the sources of swap_blocks lie to its destinations in memory: apart, the same arrays in the same order, or
// overlapping in some other way.
enum class Overlap { kNone, kOnePool, kOther };

struct GatherParams {
  const void* key_cache;       // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* value_cache;     // as key_cache
  const int32_t* block_table;  // [num_seqs, max_blocks]
  const int32_t* seq_lens;     // [num_seqs]: tokens to gather
  const int32_t* seq_starts;   // [num_seqs] or null
  void* key;                   // [num_tokens, num_kv_heads, head_dim], contiguous
  void* value;                 // as key
  ScaleView k_scale, v_scale;
  DType cache_dtype, out_dtype;
  int num_tokens;  // rows of key; those past the sum of seq_lens, and those past a row of the table, become 0
  int num_seqs, num_kv_heads, head_dim, block_size, max_blocks;
  int64_t num_blocks;
  BlockStrides key_strides, value_strides;
  int64_t block_table_stride, seq_lens_stride, seq_starts_stride;
};

struct MergeParams {
  const void* output_a;  // [num_tokens, num_heads, head_dim]
  const float* lse_a;    // [num_tokens, num_heads]
  const void* output_b;
  const float* lse_b;
  void* out;       // may be output_a or output_b
  float* out_lse;  // may be lse_a or lse_b
  DType dtype;
  int num_tokens, num_heads, head_dim;
  TokenStrides a_strides, b_strides, out_strides;
  TokenStrides lse_a_strides, lse_b_strides, out_lse_strides;
};

// Memory for launches, from the caller.
class Workspace {
 public:
  // Uninitialised; valid for work queued on the stream before the op returns.
  virtual void* scratch(size_t bytes) = 0;
  // Every byte 0xff when first handed out; kernels restore that before they end.  It belongs to one stream, and inside
  // a graph capture to that capture and stream, so two launches that use it never overlap.
  virtual void* marked(size_t bytes) = 0;

 protected:
  ~Workspace() = default;
};

}  // namespace paged_attn
