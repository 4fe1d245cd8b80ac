// The schemas of all ops, in one place.  paged_attn/ops.py documents the arguments.
#include <torch/csrc/stable/library.h>

#define ATTENTION_ARGS                                                                                         \
  "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "                  \
  "Tensor? cu_seqlens_q=None, float? scale=None, bool causal=True, int? window_size=None, float softcap=0.0, " \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "                \
  "bool batch_invariant=False, SymInt? max_seqlen_q=None, int flags=0"

STABLE_TORCH_LIBRARY(paged_attn, m) {
  m.def("paged_attention(" ATTENTION_ARGS ", bool return_lse=False) -> (Tensor, Tensor)");
  m.def("paged_attention.out(" ATTENTION_ARGS ", *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()");
  m.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()");
  m.def(
      "rope_write_kv(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor positions, Tensor cos_sin, "
      "Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slot_mapping, bool interleaved=False, "
      "Tensor(e!)? k_scale=None, Tensor(f!)? v_scale=None) -> ()");
  m.def(
      "gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor? seq_starts=None, "
      "Tensor? k_scale=None, Tensor? v_scale=None, ScalarType? out_dtype=None, SymInt? total_tokens=None) "
      "-> (Tensor, Tensor)");
  m.def("merge_attn_states(Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b) -> (Tensor, Tensor)");
  m.def(
      "merge_attn_states.out(Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b, Tensor(a!) out, "
      "Tensor(b!) out_lse) -> ()");
  m.def("copy_blocks(Tensor(a!)[] caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor block_mapping, bool host_is_pinned=False) -> ()");
}
