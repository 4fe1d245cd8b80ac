// From tensors to Params: the checks and the filling, once for every device.  A Backend supplies
//   static void paged_attention(const AttentionParams&, const Tensor& on);   and so on,
// where `on` is a tensor that names the device (and with it the stream).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "block_arrays.h"
#include "checks.h"

namespace paged_attn {

// Bits of the `flags` argument of paged_attention.
constexpr int64_t kFlagMetadataReady = 1;
constexpr int64_t kFlagNoPdl = 2;
constexpr int64_t kFlagForceMma = 4;
constexpr int64_t kFlagForceSm90 = 8;

using OptionalTensor = std::optional<Tensor>;

inline AttentionParams attention_params(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                        const Tensor& block_table, const Tensor& seq_lens,
                                        const OptionalTensor& cu_seqlens_q, std::optional<double> scale, bool causal,
                                        std::optional<int64_t> window_size, double softcap,
                                        const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                        const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                        bool batch_invariant, std::optional<int64_t> max_seqlen_q, int64_t flags) {
  AttentionParams p = {};
  check_dim("query", query, 3, "[num_tokens, num_heads, head_dim]");
  p.dtype = float_dtype("query", query.scalar_type());
  check_last_stride("query", query);
  p.cache_dtype = check_caches(key_cache, value_cache);
  check_device("key_cache", key_cache, "query", query);
  if (!is_quantized(p.cache_dtype)) check_dtype_like("key_cache", key_cache, query, " like query");
  check_size("query", query, 2, key_cache.size(3), "head_dim of key_cache");
  if (query.size(1) < 1 || query.size(1) % key_cache.size(2) != 0)
    fail("query: expected a number of heads that is a multiple of the cache's ", key_cache.size(2), ", got ",
         query.size(1));

  check_dim("block_table", block_table, 2, "[num_seqs, max_blocks]");
  check_dtype("block_table", block_table, ScalarType::Int);
  check_device("block_table", block_table, "query", query);
  check_last_stride("block_table", block_table);
  check_int32_vector("seq_lens", seq_lens, block_table.size(0), "one a row of block_table", query);
  if (cu_seqlens_q)
    check_int32_vector("cu_seqlens_q", *cu_seqlens_q, seq_lens.size(0) + 1, "[num_seqs + 1]", query);
  else if (query.size(0) != seq_lens.size(0))
    fail("query: expected ", seq_lens.size(0), " tokens (one a sequence, without cu_seqlens_q), got ", query.size(0));

  p.scale = scale ? *scale : 1 / std::sqrt(double(query.size(2)));
  p.softcap = softcap;
  if (!std::isfinite(p.scale)) fail("scale: expected a finite float32, got ", *scale);
  if (softcap != 0 && !(softcap >= kMinSoftcap && softcap <= kMaxSoftcap))
    fail("softcap: expected 0, or a number from ", kMinSoftcap, " to ", kMaxSoftcap, ", got ", softcap);
  if (window_size && *window_size < 1) fail("window_size: expected None or at least 1, got ", *window_size);
  if (window_size && !causal) fail("window_size: expected None with causal=False, got ", *window_size);
  for (auto [name, t] : {std::pair{"alibi_slopes", &alibi_slopes}, std::pair{"sinks", &sinks}}) {
    if (!*t) continue;
    check_dim(name, **t, 1, "[num_heads]");
    check_size(name, **t, 0, query.size(1), "num_heads");
    check_dtype(name, **t, ScalarType::Float);
    check_device(name, **t, "query", query);
    check_last_stride(name, **t);
  }
  std::tie(p.k_scale, p.v_scale) = scale_views(k_scale, key_cache, v_scale, value_cache);
  check_fits_int("query", query.size(0) * query.size(1));
  check_fits_int("block_table", block_table.size(1) * key_cache.size(1));
  if (max_seqlen_q && *max_seqlen_q < 0) fail("max_seqlen_q: expected None or at least 0, got ", *max_seqlen_q);

  p.query = query.data_ptr();
  p.key_cache = key_cache.data_ptr();
  p.value_cache = value_cache.data_ptr();
  p.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  p.cu_seqlens_q = cu_seqlens_q ? static_cast<const int32_t*>(cu_seqlens_q->data_ptr()) : nullptr;
  p.alibi_slopes = alibi_slopes ? static_cast<const float*>(alibi_slopes->data_ptr()) : nullptr;
  p.sinks = sinks ? static_cast<const float*>(sinks->data_ptr()) : nullptr;
  p.num_tokens = query.size(0);
  p.num_seqs = seq_lens.size(0);
  p.num_heads = query.size(1);
  p.num_kv_heads = key_cache.size(2);
  p.head_dim = query.size(2);
  p.num_blocks = key_cache.size(0);
  p.block_size = key_cache.size(1);
  p.max_blocks = block_table.size(1);
  p.query_strides = token_strides(query);
  p.key_strides = block_strides(key_cache);
  p.value_strides = block_strides(value_cache);
  p.block_table_stride = block_table.stride(0);
  p.seq_lens_stride = seq_lens.stride(0);
  p.cu_seqlens_q_stride = cu_seqlens_q ? cu_seqlens_q->stride(0) : 0;
  p.window_size = window_size && *window_size <= kMaxWindow ? *window_size : 0;
  p.causal = causal;
  p.batch_invariant = batch_invariant;
  p.max_seqlen_q = cu_seqlens_q ? std::min<int64_t>(max_seqlen_q.value_or(0), p.num_tokens) : 1;
  p.metadata_ready = flags & kFlagMetadataReady;
  p.pdl = !(flags & kFlagNoPdl);
  p.backend = flags & kFlagForceMma    ? AttentionBackend::kMma
              : flags & kFlagForceSm90 ? AttentionBackend::kSm90
                                       : AttentionBackend::kAuto;
  return p;
}

inline KvWriteParams kv_write_params(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                     const Tensor& value_cache, const Tensor& slot_mapping,
                                     const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  KvWriteParams p = {};
  p.cache_dtype = check_caches(key_cache, value_cache);
  check_written("key_cache", key_cache);
  check_written("value_cache", value_cache);
  for (auto [name, t] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_dim(name, *t, 3, "[num_tokens, num_kv_heads, head_dim]");
    p.dtype = float_dtype(name, t->scalar_type());
    if (!is_quantized(p.cache_dtype)) check_dtype_like(name, *t, key_cache, " like key_cache");
    check_device(name, *t, "key_cache", key_cache);
    check_size(name, *t, 1, key_cache.size(2), "num_kv_heads of key_cache");
    check_size(name, *t, 2, key_cache.size(3), "head_dim of key_cache");
    check_last_stride(name, *t);
  }
  check_dtype_like("value", value, key, " like key");
  check_size("value", value, 0, key.size(0), "tokens of key");
  check_dim("slot_mapping", slot_mapping, 1, "[num_slots]");
  p.slots_are_int64 = slot_mapping.scalar_type() == ScalarType::Long;
  if (!p.slots_are_int64) check_dtype("slot_mapping", slot_mapping, ScalarType::Int, " or torch.int64");
  check_device("slot_mapping", slot_mapping, "key_cache", key_cache);
  if (slot_mapping.size(0) > key.size(0))
    fail("slot_mapping: expected at most ", key.size(0), " slots (the tokens of key), got ", slot_mapping.size(0));
  check_fits_int("slot_mapping", slot_mapping.size(0) * key_cache.size(2));
  std::tie(p.k_scale, p.v_scale) = scale_views(k_scale, key_cache, v_scale, value_cache);
  if (p.k_scale.data && k_scale->dim() == 3) check_written("k_scale", *k_scale);
  if (p.v_scale.data && v_scale->dim() == 3) check_written("v_scale", *v_scale);
  p.key = key.data_ptr();
  p.value = value.data_ptr();
  p.key_cache = key_cache.data_ptr();
  p.value_cache = value_cache.data_ptr();
  p.slot_mapping = slot_mapping.data_ptr();
  p.num_tokens = slot_mapping.size(0);
  p.num_kv_heads = key_cache.size(2);
  p.head_dim = key_cache.size(3);
  p.block_size = key_cache.size(1);
  p.num_blocks = key_cache.size(0);
  p.slot_stride = slot_mapping.stride(0);
  p.key_strides = token_strides(key);
  p.value_strides = token_strides(value);
  p.key_cache_strides = block_strides(key_cache);
  p.value_cache_strides = block_strides(value_cache);
  return p;
}

template <class Backend>
struct Ops {
  static void paged_attention_out(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                  const Tensor& block_table, const Tensor& seq_lens, const OptionalTensor& cu_seqlens_q,
                                  std::optional<double> scale, bool causal, std::optional<int64_t> window_size,
                                  double softcap, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                  const OptionalTensor& k_scale, const OptionalTensor& v_scale, bool batch_invariant,
                                  std::optional<int64_t> max_seqlen_q, int64_t flags, const Tensor& out,
                                  const OptionalTensor& lse) {
    AttentionParams p =
        attention_params(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, scale, causal, window_size,
                         softcap, alibi_slopes, sinks, k_scale, v_scale, batch_invariant, max_seqlen_q, flags);
    if (!same_shape(out, query)) fail("out: expected shape ", shape_of(query), " like query, got ", shape_of(out));
    check_dtype_like("out", out, query, " like query");
    check_device("out", out, "query", query);
    check_last_stride("out", out);
    check_written("out", out);
    p.out = out.data_ptr();
    p.out_strides = token_strides(out);
    if (lse) {
      if (lse->dim() != 2 || lse->size(0) != query.size(0) || lse->size(1) != query.size(1) || !lse->is_contiguous())
        fail("lse: expected a contiguous [num_tokens, num_heads], got shape ", shape_of(*lse));
      check_dtype("lse", *lse, ScalarType::Float);
      check_device("lse", *lse, "query", query);
      p.lse = static_cast<float*>(lse->data_ptr());
    }
    Backend::paged_attention(p, query);
  }

  static std::tuple<Tensor, Tensor> paged_attention(
      const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
      const Tensor& seq_lens, const OptionalTensor& cu_seqlens_q, std::optional<double> scale, bool causal,
      std::optional<int64_t> window_size, double softcap, const OptionalTensor& alibi_slopes,
      const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale, bool batch_invariant,
      std::optional<int64_t> max_seqlen_q, int64_t flags, bool return_lse) {
    check_dim("query", query, 3, "[num_tokens, num_heads, head_dim]");
    Tensor out = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)});
    Tensor lse = torch::stable::new_empty(query, {return_lse ? query.size(0) : 0, query.size(1)}, ScalarType::Float);
    paged_attention_out(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, scale, causal, window_size,
                        softcap, alibi_slopes, sinks, k_scale, v_scale, batch_invariant, max_seqlen_q, flags, out,
                        return_lse ? OptionalTensor(lse) : std::nullopt);
    return {out, lse};
  }

  static void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
    const KvWriteParams p = kv_write_params(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale);
    if (p.num_tokens > 0) Backend::write_kv(p, key_cache);
  }

  static void rope_write_kv(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& positions,
                            const Tensor& cos_sin, const Tensor& key_cache, const Tensor& value_cache,
                            const Tensor& slot_mapping, bool interleaved, const OptionalTensor& k_scale,
                            const OptionalTensor& v_scale) {
    RopeWriteParams p = {};
    p.write = kv_write_params(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale);
    check_dim("query", query, 3, "[num_tokens, num_heads, head_dim]");
    check_size("query", query, 0, key.size(0), "tokens of key");
    check_size("query", query, 2, key.size(2), "head_dim of key");
    check_dtype_like("query", query, key, " like key");
    check_device("query", query, "key", key);
    check_last_stride("query", query);
    check_written("query", query);
    check_written("key", key);
    check_dim("positions", positions, 1, "[num_tokens]");
    check_size("positions", positions, 0, key.size(0), "tokens of key");
    p.positions_are_int64 = positions.scalar_type() == ScalarType::Long;
    if (!p.positions_are_int64) check_dtype("positions", positions, ScalarType::Int, " or torch.int64");
    check_device("positions", positions, "key", key);
    check_dim("cos_sin", cos_sin, 2, "[num_positions, rotary_dim]");
    if (cos_sin.size(1) < 2 || cos_sin.size(1) % 2 != 0 || cos_sin.size(1) > key.size(2))
      fail("cos_sin: expected an even rotary dimension from 2 to head_dim ", key.size(2), ", got shape ",
           shape_of(cos_sin));
    p.cos_sin_is_float32 = cos_sin.scalar_type() == ScalarType::Float;
    if (!p.cos_sin_is_float32) check_dtype_like("cos_sin", cos_sin, key, " like key, or torch.float32");
    check_device("cos_sin", cos_sin, "key", key);
    check_last_stride("cos_sin", cos_sin);
    check_fits_int("query", query.size(0) * (query.size(1) + 2 * key.size(1)));
    p.query = query.data_ptr();
    p.key = key.data_ptr();
    p.positions = positions.data_ptr();
    p.cos_sin = cos_sin.data_ptr();
    p.interleaved = interleaved;
    p.num_tokens = query.size(0);
    p.num_heads = query.size(1);
    p.rotary_dim = cos_sin.size(1);
    p.num_positions = cos_sin.size(0);
    p.positions_stride = positions.stride(0);
    p.cos_sin_stride = cos_sin.stride(0);
    p.query_strides = token_strides(query);
    if (p.num_tokens > 0) Backend::rope_write_kv(p, key_cache);
  }

  static std::tuple<Tensor, Tensor> gather_kv(const Tensor& key_cache, const Tensor& value_cache,
                                              const Tensor& block_table, const Tensor& seq_lens,
                                              const OptionalTensor& seq_starts, const OptionalTensor& k_scale,
                                              const OptionalTensor& v_scale, std::optional<ScalarType> out_dtype,
                                              std::optional<int64_t> total_tokens) {
    GatherParams p = {};
    p.cache_dtype = check_caches(key_cache, value_cache);
    check_dim("block_table", block_table, 2, "[num_seqs, max_blocks]");
    check_dtype("block_table", block_table, ScalarType::Int);
    check_device("block_table", block_table, "key_cache", key_cache);
    check_last_stride("block_table", block_table);
    check_int32_vector("seq_lens", seq_lens, block_table.size(0), "one a row of block_table", key_cache);
    if (seq_starts)
      check_int32_vector("seq_starts", *seq_starts, block_table.size(0), "one a row of block_table", key_cache);
    p.k_scale = scale_view("k_scale", k_scale, key_cache);
    p.v_scale = scale_view("v_scale", v_scale, value_cache);
    // A quantised cache is widened by the kernel; any other is copied as it is and converted afterwards, if asked.
    const bool quantized = is_quantized(p.cache_dtype);
    const ScalarType wanted = out_dtype ? *out_dtype : quantized ? ScalarType::BFloat16 : key_cache.scalar_type();
    const DType wanted_dtype = float_dtype("out_dtype", wanted);
    const ScalarType type = quantized ? wanted : key_cache.scalar_type();
    p.out_dtype = quantized ? wanted_dtype : p.cache_dtype;
    check_fits_int("block_table", block_table.size(1) * key_cache.size(1));
    const int64_t width = block_table.size(1) * key_cache.size(1);
    int64_t tokens = 0;
    if (total_tokens) {
      tokens = *total_tokens;
      if (tokens < 0) fail("total_tokens: expected at least 0, got ", tokens);
    } else {
      const Tensor cpu_lens = host_copy(seq_lens);
      const OptionalTensor cpu_starts = seq_starts ? OptionalTensor(host_copy(*seq_starts)) : std::nullopt;
      for (int64_t i = 0; i < cpu_lens.size(0); i++) {
        const int64_t n = element(cpu_lens, i), start = cpu_starts ? element(*cpu_starts, i) : 0;
        if (n < 0) fail("seq_lens: expected at least 0, got ", n, " for sequence ", i);
        if (start < 0) fail("seq_starts: expected at least 0, got ", start, " for sequence ", i);
        if (n > 0 && start + n > width)
          fail("seq_lens: expected tokens inside the row of block_table (", width, " slots), got ", n, " from ", start,
               " on for sequence ", i);
        tokens += n;
      }
    }
    check_fits_int("seq_lens", tokens);
    p.key = p.value = nullptr;
    p.num_tokens = tokens;
    p.num_seqs = seq_lens.size(0);
    p.num_kv_heads = key_cache.size(2);
    p.head_dim = key_cache.size(3);
    p.block_size = key_cache.size(1);
    p.max_blocks = block_table.size(1);
    p.num_blocks = key_cache.size(0);
    p.key_strides = block_strides(key_cache);
    p.value_strides = block_strides(value_cache);
    p.block_table_stride = block_table.stride(0);
    p.seq_lens_stride = seq_lens.stride(0);
    p.seq_starts_stride = seq_starts ? seq_starts->stride(0) : 0;
    p.key_cache = key_cache.data_ptr();
    p.value_cache = value_cache.data_ptr();
    p.block_table = static_cast<const int32_t*>(block_table.data_ptr());
    p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
    p.seq_starts = seq_starts ? static_cast<const int32_t*>(seq_starts->data_ptr()) : nullptr;
    Tensor key = torch::stable::new_empty(key_cache, {tokens, key_cache.size(2), key_cache.size(3)}, type);
    Tensor value = torch::stable::new_empty(key_cache, {tokens, key_cache.size(2), key_cache.size(3)}, type);
    p.key = key.data_ptr();
    p.value = value.data_ptr();
    Backend::gather_kv(p, key_cache);
    if (type != wanted) return {torch::stable::to(key, wanted), torch::stable::to(value, wanted)};
    return {key, value};
  }

  static void merge_attn_states_out(const Tensor& output_a, const Tensor& lse_a, const Tensor& output_b,
                                    const Tensor& lse_b, const Tensor& out, const Tensor& out_lse) {
    MergeParams p = {};
    check_dim("output_a", output_a, 3, "[num_tokens, num_heads, head_dim]");
    p.dtype = float_dtype("output_a", output_a.scalar_type());
    for (auto [name, t] :
         {std::pair{"output_a", &output_a}, std::pair{"output_b", &output_b}, std::pair{"out", &out}}) {
      if (!same_shape(*t, output_a))
        fail(name, ": expected shape ", shape_of(output_a), " like output_a, got ", shape_of(*t));
      check_dtype_like(name, *t, output_a, " like output_a");
      check_device(name, *t, "output_a", output_a);
      check_last_stride(name, *t);
    }
    for (auto [name, t] : {std::pair{"lse_a", &lse_a}, std::pair{"lse_b", &lse_b}, std::pair{"out_lse", &out_lse}}) {
      check_dim(name, *t, 2, "[num_tokens, num_heads]");
      check_size(name, *t, 0, output_a.size(0), "tokens of output_a");
      check_size(name, *t, 1, output_a.size(1), "heads of output_a");
      check_dtype(name, *t, ScalarType::Float);
      check_device(name, *t, "output_a", output_a);
    }
    check_written("out", out);
    check_written("out_lse", out_lse);
    check_head_dim("output_a", output_a.size(2));
    check_fits_int("output_a", output_a.size(0) * output_a.size(1));
    p.output_a = output_a.data_ptr();
    p.output_b = output_b.data_ptr();
    p.lse_a = static_cast<const float*>(lse_a.data_ptr());
    p.lse_b = static_cast<const float*>(lse_b.data_ptr());
    p.out = out.data_ptr();
    p.out_lse = static_cast<float*>(out_lse.data_ptr());
    p.num_tokens = output_a.size(0);
    p.num_heads = output_a.size(1);
    p.head_dim = output_a.size(2);
    p.a_strides = token_strides(output_a);
    p.b_strides = token_strides(output_b);
    p.out_strides = token_strides(out);
    p.lse_a_strides = token_strides(lse_a);
    p.lse_b_strides = token_strides(lse_b);
    p.out_lse_strides = token_strides(out_lse);
    if (output_a.numel() > 0) Backend::merge_attn_states(p, output_a);
  }

  static std::tuple<Tensor, Tensor> merge_attn_states(const Tensor& output_a, const Tensor& lse_a,
                                                      const Tensor& output_b, const Tensor& lse_b) {
    check_dim("output_a", output_a, 3, "[num_tokens, num_heads, head_dim]");
    check_dim("lse_a", lse_a, 2, "[num_tokens, num_heads]");
    Tensor out = torch::stable::new_empty(output_a, {output_a.size(0), output_a.size(1), output_a.size(2)});
    Tensor out_lse = torch::stable::new_empty(lse_a, {lse_a.size(0), lse_a.size(1)});
    merge_attn_states_out(output_a, lse_a, output_b, lse_b, out, out_lse);
    return {out, out_lse};
  }

  static void copy_blocks(const std::vector<Tensor>& caches, const Tensor& block_mapping) {
    check_block_mapping(block_mapping);
    BlockArrays arrays = block_arrays("caches", caches, "caches", caches);
    if (caches.empty()) return;
    if (block_mapping.is_cpu())
      check_pairs(block_mapping, "caches", arrays.src, "caches", arrays.dst);
    else
      check_device("block_mapping", block_mapping, "caches", caches[0]);
    drop_repeated(arrays.src);
    if (block_mapping.size(0) > 0)
      Backend::copy_blocks(arrays.src, torch::stable::contiguous(block_mapping), caches[0]);
  }

  static void swap_blocks(const std::vector<Tensor>& src, const std::vector<Tensor>& dst, const Tensor& block_mapping,
                          bool host_is_pinned) {
    check_block_mapping(block_mapping);
    if (!block_mapping.is_cpu()) fail("block_mapping: expected a tensor on the host, got ", device_of(block_mapping));
    const BlockArrays arrays = block_arrays("src", src, "dst", dst);
    if (src.empty()) return;
    check_pairs(block_mapping, "src", arrays.src, "dst", arrays.dst);
    check_not_repeated("dst", arrays.dst);
    if (block_mapping.size(0) > 0)
      Backend::swap_blocks(arrays.src, arrays.dst, torch::stable::contiguous(block_mapping), src[0], dst[0],
                           same_device(src[0], dst[0]) ? overlap_of(arrays) : Overlap::kNone, host_is_pinned);
  }

 private:
  static Tensor host_copy(const Tensor& t) {
    return t.is_cpu() ? t : torch::stable::to(t, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  }
  static int64_t element(const Tensor& t, int64_t i) {
    return static_cast<const int32_t*>(t.data_ptr())[i * t.stride(0)];
  }
};

template <class Backend, class Library>
void register_ops(Library& m) {
  m.impl("paged_attention", TORCH_BOX(&Ops<Backend>::paged_attention));
  m.impl("paged_attention.out", TORCH_BOX(&Ops<Backend>::paged_attention_out));
  m.impl("write_kv", TORCH_BOX(&Ops<Backend>::write_kv));
  m.impl("rope_write_kv", TORCH_BOX(&Ops<Backend>::rope_write_kv));
  m.impl("gather_kv", TORCH_BOX(&Ops<Backend>::gather_kv));
  m.impl("merge_attn_states", TORCH_BOX(&Ops<Backend>::merge_attn_states));
  m.impl("merge_attn_states.out", TORCH_BOX(&Ops<Backend>::merge_attn_states_out));
  m.impl("copy_blocks", TORCH_BOX(&Ops<Backend>::copy_blocks));
  m.impl("swap_blocks", TORCH_BOX(&Ops<Backend>::swap_blocks));
}

}  // namespace paged_attn
