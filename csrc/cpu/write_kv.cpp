#include "../errors.h"
#include "kernels.h"
#include "parallel.h"
#include "types.h"

namespace paged_attn::cpu {
namespace {

int64_t slot_at(const KvWriteParams& p, int64_t i) {
  return p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[i * p.slot_stride]
                           : static_cast<const int32_t*>(p.slot_mapping)[i * p.slot_stride];
}

// amax / largest finite value, over the finite elements; 1 where that gives no scale.
template <class T, class CacheT>
float row_scale(const T* row, int head_dim) {
  float amax = 0.f;
  for (int d = 0; d < head_dim; ++d) {
    const float magnitude = std::fabs(to_float(row[d]));
    amax = magnitude > amax && magnitude <= std::numeric_limits<float>::max() ? magnitude : amax;
  }
  const float scale = amax / kMaxFinite<CacheT>;
  return scale > 0.f ? scale : 1.f;
}

template <class T, class CacheT>
void write_row(const T* row, CacheT* slot, int head_dim, const ScaleView& scales, int64_t block, int64_t offset,
               int64_t head) {
  if constexpr (std::is_same_v<T, CacheT>) {
    std::memcpy(slot, row, sizeof(T) * head_dim);
  } else {
    float scale;
    if (scales.per_token()) {
      scale = row_scale<T, CacheT>(row, head_dim);
      const BlockStrides& s = scales.strides;
      scales.data[block * s.block + offset * s.slot + head * s.head] = scale;
    } else {
      scale = scale_at(scales, block, offset, head);
    }
    for (int d = 0; d < head_dim; ++d) slot[d] = from_float<CacheT>(to_float(row[d]) / scale);
  }
}

template <class T, class CacheT>
void write_all(const KvWriteParams& p) {
  const auto write = [&](const void* rows, const TokenStrides& from, void* cache, const BlockStrides& to,
                         const ScaleView& scales, int64_t token, int64_t block, int64_t offset) {
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      write_row(static_cast<const T*>(rows) + token * from.token + head * from.head,
                static_cast<CacheT*>(cache) + block * to.block + offset * to.slot + head * to.head, p.head_dim, scales,
                block, offset, head);
    }
  };
  const int64_t row_elements = 2 * int64_t{p.num_kv_heads} * p.head_dim;
  parallel_each(p.num_tokens, 1 + 32768 / row_elements, [&](int64_t token) {
    const int64_t slot = slot_at(p, token);
    if (slot < 0) return;
    const int64_t block = slot / p.block_size, offset = slot % p.block_size;
    write(p.key, p.key_strides, p.key_cache, p.key_cache_strides, p.k_scale, token, block, offset);
    write(p.value, p.value_strides, p.value_cache, p.value_cache_strides, p.v_scale, token, block, offset);
  });
}

}  // namespace

void check_slots(const KvWriteParams& p) {
  const int64_t num_slots = p.num_blocks * p.block_size;
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    if (slot_at(p, i) >= num_slots)
      fail("slot_mapping[", i, "]: got slot ", slot_at(p, i), ", the cache has slots 0 .. ", num_slots - 1);
  }
}

void write_kv(const KvWriteParams& p) {
  check_slots(p);
  if (p.num_tokens == 0) return;
  visit_float_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!is_quantized(p.cache_dtype)) return write_all<T, T>(p);
    visit_type(p.cache_dtype, [&](auto cache_tag) {
      using CacheT = typename decltype(cache_tag)::type;
      if constexpr (sizeof(CacheT) == 1) write_all<T, CacheT>(p);
    });
  });
}

}  // namespace paged_attn::cpu
