// Argument checks.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "errors.h"
#include "params.h"

namespace paged_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Float8_e4m3fn:
      return "torch.float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "torch.float8_e5m2";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Bool:
      return "torch.bool";
    default:
      return "another dtype";
  }
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream s;
  s << '[';
  for (int64_t i = 0; i < t.dim(); i++) s << (i ? ", " : "") << t.size(i);
  s << ']';
  return s.str();
}

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device";
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  int32_t types[2];
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &types[0]));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &types[1]));
  return types[0] == types[1] && a.get_device_index() == b.get_device_index();
}

// Cheaper than to compare two scalar_type(): that tries one type after the other.
inline bool same_dtype(const Tensor& a, const Tensor& b) {
  int32_t types[2];
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(a.get(), &types[0]));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(b.get(), &types[1]));
  return types[0] == types[1];
}

inline void check_dim(const char* name, const Tensor& t, int64_t dim, const char* shape) {
  if (t.dim() != dim) fail(name, ": expected shape ", shape, ", got ", shape_of(t));
}

inline void check_size(const char* name, const Tensor& t, int64_t dim, int64_t size, const char* what) {
  if (t.size(dim) != size)
    fail(name, ": expected size ", size, " (", what, ") in dimension ", dim, ", got shape ", shape_of(t));
}

inline void check_dtype(const char* name, const Tensor& t, ScalarType type, const char* why = "") {
  if (t.scalar_type() != type) fail(name, ": expected dtype ", name_of(type), why, ", got ", name_of(t.scalar_type()));
}

inline void check_dtype_like(const char* name, const Tensor& t, const Tensor& like, const char* why) {
  if (!same_dtype(t, like)) check_dtype(name, t, like.scalar_type(), why);
}

inline void check_device(const char* name, const Tensor& t, const char* like_name, const Tensor& like) {
  if (!same_device(t, like))
    fail(name, ": expected device ", device_of(like), " like ", like_name, ", got ", device_of(t));
}

inline void check_last_stride(const char* name, const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1)
    fail(name, ": expected a last stride of 1, got ", t.stride(last), " for shape ", shape_of(t));
}

// A tensor that is written: an expanded one has many elements at one address.
inline void check_written(const char* name, const Tensor& t) {
  for (int64_t i = 0; i < t.dim(); i++)
    if (t.stride(i) == 0 && t.size(i) > 1)
      fail(name, ": expected an address for every element, got stride 0 in dimension ", i, " of shape ", shape_of(t));
}

inline std::optional<DType> dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3;
    case ScalarType::Float8_e5m2:
      return DType::kFloat8E5M2;
    case ScalarType::Char:
      return DType::kInt8;
    default:
      return std::nullopt;
  }
}

inline DType float_dtype(const char* name, ScalarType type) {
  const std::optional<DType> dtype = dtype_of(type);
  if (!dtype || is_quantized(*dtype))
    fail(name, ": expected dtype torch.float16, torch.bfloat16 or torch.float32, got ", name_of(type));
  return *dtype;
}

inline DType cache_dtype(const char* name, const Tensor& t) {
  const std::optional<DType> dtype = dtype_of(t.scalar_type());
  if (!dtype)
    fail(name,
         ": expected dtype torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2 or "
         "torch.int8, got ",
         name_of(t.scalar_type()));
  return *dtype;
}

inline TokenStrides token_strides(const Tensor& t) { return {t.stride(0), t.stride(1)}; }
inline BlockStrides block_strides(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

inline void check_head_dim(const char* name, int64_t head_dim) {
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0)
    fail(name, ": expected a head dimension that is a multiple of 8 from 8 to 256, got ", head_dim);
}

// key_cache and value_cache: [num_blocks, block_size, num_kv_heads, head_dim], alike.
inline DType check_caches(const Tensor& key_cache, const Tensor& value_cache) {
  constexpr const char* kShape = "[num_blocks, block_size, num_kv_heads, head_dim]";
  check_dim("key_cache", key_cache, 4, kShape);
  check_dim("value_cache", value_cache, 4, kShape);
  if (!same_shape(key_cache, value_cache))
    fail("value_cache: expected shape ", shape_of(key_cache), " like key_cache, got ", shape_of(value_cache));
  const DType dtype = cache_dtype("key_cache", key_cache);
  check_dtype_like("value_cache", value_cache, key_cache, " like key_cache");
  check_device("value_cache", value_cache, "key_cache", key_cache);
  check_last_stride("key_cache", key_cache);
  check_last_stride("value_cache", value_cache);
  check_head_dim("key_cache", key_cache.size(3));
  if (key_cache.size(1) < 1) fail("key_cache: expected a block size of at least 1, got shape ", shape_of(key_cache));
  if (key_cache.size(2) < 1) fail("key_cache: expected at least one KV head, got shape ", shape_of(key_cache));
  return dtype;
}

// A scale of one element, of [num_kv_heads], or of [num_blocks, block_size, num_kv_heads].
inline ScaleView scale_view(const char* name, const std::optional<Tensor>& scale, const Tensor& cache) {
  if (!scale) return {nullptr, {0, 0, 0}};
  if (!is_quantized(cache_dtype("key_cache", cache)))
    fail(name, ": expected None with an unquantised cache of dtype ", name_of(cache.scalar_type()), ", got a tensor");
  check_dtype(name, *scale, ScalarType::Float);
  check_device(name, *scale, "key_cache", cache);
  float* data = static_cast<float*>(scale->data_ptr());
  if (scale->dim() == 3 && scale->size(0) == cache.size(0) && scale->size(1) == cache.size(1) &&
      scale->size(2) == cache.size(2))
    return {data, {scale->stride(0), scale->stride(1), scale->stride(2)}};
  if (scale->numel() == 1) return {data, {0, 0, 0}};
  if (scale->dim() == 1 && scale->size(0) == cache.size(2)) return {data, {0, 0, scale->stride(0)}};
  fail(name, ": expected 1 element, [num_kv_heads] = [", cache.size(2),
       "] or [num_blocks, block_size, num_kv_heads] = [", cache.size(0), ", ", cache.size(1), ", ", cache.size(2),
       "], got shape ", shape_of(*scale));
}

// The scales of both caches, of one kind.
inline std::pair<ScaleView, ScaleView> scale_views(const std::optional<Tensor>& k_scale, const Tensor& key_cache,
                                                   const std::optional<Tensor>& v_scale, const Tensor& value_cache) {
  const ScaleView k = scale_view("k_scale", k_scale, key_cache), v = scale_view("v_scale", v_scale, value_cache);
  if (k.data && v.data && k.per_token() != v.per_token())
    fail("v_scale: expected the kind of k_scale, per token or not, got shape ", shape_of(*v_scale));
  return {k, v};
}

inline void check_int32_vector(const char* name, const Tensor& t, int64_t size, const char* what, const Tensor& like) {
  check_dim(name, t, 1, what);
  if (size >= 0 && t.size(0) != size) fail(name, ": expected shape [", size, "] (", what, "), got ", shape_of(t));
  check_dtype(name, t, ScalarType::Int);
  check_device(name, t, "query", like);
}

inline void check_fits_int(const char* name, int64_t size) {
  if (size > INT32_MAX) fail(name, ": expected a size below 2**31, got ", size);
}

}  // namespace paged_attn
