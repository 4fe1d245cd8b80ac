// rope_write_kv: rotary embedding of queries and keys in place, then write_kv.
#include <limits>

#include "kernels.h"
#include "parallel.h"
#include "types.h"

namespace paged_attn::cpu {
namespace {

template <class T>
void rotate_row(T* row, const float* cos_sin, int rotary_dim, bool interleaved) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    T& first = row[interleaved ? 2 * i : i];
    T& second = row[interleaved ? 2 * i + 1 : i + half];
    const float x = to_float(first), y = to_float(second), cosine = cos_sin[i], sine = cos_sin[half + i];
    first = from_float<T>(x * cosine - y * sine);
    second = from_float<T>(y * cosine + x * sine);
  }
}

// The position's row of the table as floats; NaN where the position lies outside.
template <class T>
void load_cos_sin(const RopeWriteParams& p, int64_t token, float* out) {
  const int64_t i = token * p.positions_stride;
  const int64_t position =
      p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[i] : static_cast<const int32_t*>(p.positions)[i];
  const bool known = position >= 0 && position < p.num_positions;
  for (int k = 0; k < p.rotary_dim; ++k) {
    const int64_t at = position * p.cos_sin_stride + k;
    out[k] = !known                 ? std::numeric_limits<float>::quiet_NaN()
             : p.cos_sin_is_float32 ? static_cast<const float*>(p.cos_sin)[at]
                                    : to_float(static_cast<const T*>(p.cos_sin)[at]);
  }
}

}  // namespace

void rope_write_kv(const RopeWriteParams& p) {
  check_slots(p.write);
  visit_float_type(p.write.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_each(p.num_tokens, 16, [&](int64_t token) {
      float cos_sin[256];
      load_cos_sin<T>(p, token, cos_sin);
      for (int head = 0; head < p.num_heads; ++head)
        rotate_row(static_cast<T*>(p.query) + token * p.query_strides.token + head * p.query_strides.head, cos_sin,
                   p.rotary_dim, p.interleaved);
      for (int head = 0; head < p.write.num_kv_heads; ++head)
        rotate_row(static_cast<T*>(p.key) + token * p.write.key_strides.token + head * p.write.key_strides.head,
                   cos_sin, p.rotary_dim, p.interleaved);
    });
  });
  write_kv(p.write);
}

}  // namespace paged_attn::cpu
