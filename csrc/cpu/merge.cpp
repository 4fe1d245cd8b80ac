#include "kernels.h"
#include "parallel.h"
#include "types.h"

namespace paged_attn::cpu {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

template <class T>
void merge_row(const T* a, float lse_a, const T* b, float lse_b, T* out, float* out_lse, int head_dim) {
  if (lse_a == kEmpty && lse_b == kEmpty) {
    for (int d = 0; d < head_dim; ++d) out[d] = from_float<T>(0.f);
    *out_lse = kEmpty;
  } else if ((lse_a == kEmpty || lse_b == kEmpty) && !std::isnan(lse_a) && !std::isnan(lse_b)) {
    std::memmove(static_cast<void*>(out), lse_a == kEmpty ? b : a, sizeof(T) * head_dim);
    *out_lse = lse_a == kEmpty ? lse_b : lse_a;
  } else {
    const float high = lse_a > lse_b ? lse_a : lse_b;
    const auto weigh = [&](float lse) { return lse == high ? 1.f : std::exp(lse - high); };  // high may be infinite
    const float weight_a = weigh(lse_a), weight_b = weigh(lse_b), sum = weight_a + weight_b;
    const float share_a = weight_a / sum, share_b = weight_b / sum;
    for (int d = 0; d < head_dim; ++d) out[d] = from_float<T>(share_a * to_float(a[d]) + share_b * to_float(b[d]));
    *out_lse = high + std::log(sum);
  }
}

template <class T>
T* row_at(T* data, const TokenStrides& s, int64_t token, int64_t head) {
  return data + token * s.token + head * s.head;
}

}  // namespace

void merge_attn_states(const MergeParams& p) {
  visit_float_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_each(p.num_tokens, 1 + 32768 / (1 + int64_t{p.num_heads} * p.head_dim), [&](int64_t token) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        merge_row(row_at(static_cast<const T*>(p.output_a), p.a_strides, token, head),
                  *row_at(p.lse_a, p.lse_a_strides, token, head),
                  row_at(static_cast<const T*>(p.output_b), p.b_strides, token, head),
                  *row_at(p.lse_b, p.lse_b_strides, token, head),
                  row_at(static_cast<T*>(p.out), p.out_strides, token, head),
                  row_at(p.out_lse, p.out_lse_strides, token, head), p.head_dim);
      }
    });
  });
}

}  // namespace paged_attn::cpu
