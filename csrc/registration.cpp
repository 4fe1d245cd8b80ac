// The schemas of all ops, in one place.  paged_attn/ops.py documents the arguments.
#include <torch/csrc/stable/library.h>

#define ATTENTION_ARGS                                                                                              \
  "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q, " \
  "float scale, bool causal, int window_size, float softcap, Tensor? alibi_slopes, Tensor? sinks, "                 \
  "Tensor? k_scale, Tensor? v_scale, bool batch_invariant, SymInt max_seqlen_q, int flags"

STABLE_TORCH_LIBRARY(paged_attn, m) {
  m.def("paged_attention(" ATTENTION_ARGS ", bool return_lse) -> (Tensor, Tensor)");
  m.def("paged_attention.out(" ATTENTION_ARGS ", Tensor(a!) out, Tensor(b!)? lse) -> ()");
  m.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()");
  m.def(
      "rope_write_kv(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor positions, Tensor cos_sin, "
      "Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slot_mapping, bool interleaved, Tensor(e!)? k_scale, "
      "Tensor(f!)? v_scale) -> ()");
  m.def(
      "gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor? seq_starts, "
      "Tensor? k_scale, Tensor? v_scale, ScalarType? out_dtype, SymInt? total_tokens) -> (Tensor, Tensor)");
  m.def("merge_attn_states(Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b) -> (Tensor, Tensor)");
  m.def(
      "merge_attn_states.out(Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b, Tensor(a!) out, "
      "Tensor(b!) out_lse) -> ()");
  m.def("copy_blocks(Tensor(a!)[] caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor block_mapping, bool host_is_pinned) -> ()");
}
