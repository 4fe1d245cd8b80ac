// Scores of a step, in registers of a consumer warpgroup, to probabilities: modified, masked, exponentiated, packed as
// an operand of P V.
#pragma once

#include "prefill_rows.cuh"

namespace paged_attn::sm90 {

template <class Traits>
class PrefillSoftmax : protected PrefillRows<Traits> {
  using Rows = PrefillRows<Traits>;

 protected:
  using Rows::p_, Rows::smem_, Rows::tiles_, Rows::max_, Rows::sum_, Rows::value_unit_;
  using Rows::token_scales, Rows::score_scale, Rows::lane, Rows::thread_row;
  using typename Rows::T;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kRowsAtOnce = Traits::kRowsAtOnce;

  __device__ __forceinline__ PrefillSoftmax(const PrefillParams& p, PrefillSmem<Traits> smem) : Rows(p, smem) {}

  // The values in use are those of the step before.
  __device__ __forceinline__ RingPosition<Traits::kStages> key() const { return {steps_}; }
  __device__ __forceinline__ RingPosition<Traits::kStages> value() const { return {steps_ - 1}; }

  // Raw products to scores; in units of log2 once multiplied by score_scale.
  template <bool kMasked>
  __device__ __forceinline__ void modify_scores(int step) {
    const float key_scale = Traits::kQuantized ? fabsf(tiles_.key_scale()) : 1.f;
    if (p_.cap_log2 > 0.f) {
      const float rate = p_.cap_rate * key_scale;
      float squares[4] = {0.f, 0.f, 0.f, 0.f};
      if constexpr (!kMasked) {  // columns that are no key's may hold anything, and would choose the way of the others
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) squares[i % 4] += s_[i] * s_[i];
      }
      const float all = (squares[0] + squares[1] + squares[2] + squares[3]) * (rate * rate);
      if (!kMasked && __all_sync(~0u, all <= kSmallTanh * kSmallTanh)) {
#pragma unroll
        for (float& x : s_) x = tanh_small(x * rate);
      } else {
#pragma unroll
        for (float& x : s_) x = tanh_exp2(x * rate);
      }
    } else if (!p_.attention.alibi_slopes) {
      const float rate = p_.scale_log2 * key_scale;
#pragma unroll
      for (float& x : s_) x *= rate;
    }
    if (const float* slopes = p_.attention.alibi_slopes) {
      const TileRows tile = tiles_.rows();
      const float scale = p_.cap_log2 > 0.f ? p_.cap_log2 : p_.scale_log2 * key_scale;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const TokenHead at = row_of(p_, tile, thread_row(r));
        const float slope = __ldg(slopes + tile.kv_head * p_.group + at.head) * kLog2e;
        const int position = tile.first_position() + at.token;
        const float bias = slope * static_cast<float>(step * kKeys + lane() % 4 * 2 - position);
#pragma unroll
        for (int b = 0; b < kKeys / 8; ++b)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s_[4 * b + 2 * r + e];
            x = x * scale + (bias + slope * static_cast<float>(8 * b + e));
          }
      }
    }
  }

  // S is masked, and in units of log2 once multiplied by score_scale.
  template <bool kMasked>
  __device__ __forceinline__ void finish_scores(int step) {
    if (token_scales()) {
      ptx::mbarrier_wait(smem_.scales_full(key().slot()), key().parity());
      scale_scores();
    }
    if constexpr (Traits::kScoreMods) modify_scores<kMasked>(step);
    if constexpr (kMasked) {
      const TileRows tile = tiles_.rows();
      const int column = step * kKeys + lane() % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = row_of(p_, tile, thread_row(r)).token;
        const KeyRange keys = key_range(p_.attention, tile, token, token);
        const int begin = keys.any_begin - column, end = keys.any_end - column;
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
          const int key = i / 2 * 8 + i % 2;
          if (key < begin || key >= end) s_[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
        }
      }
    }
  }

  // Of rows `first` .. `first` + kRowsAtOnce - 1 of the thread: the running maximum; what the sum and O lack.
  template <bool kMasked>
  __device__ __forceinline__ void find_maxima(int first) {
    const float scale = score_scale();
    float m[2][2];  // two chains a row, for their latency; so the sums below
#pragma unroll
    for (int r = first; r < first + kRowsAtOnce; ++r) m[r][0] = m[r][1] = max_[r];
#pragma unroll
    for (int b = 0; b < kKeys / 8; ++b)
#pragma unroll
      for (int r = first; r < first + kRowsAtOnce; ++r)
        m[r][b % 2] = fmaxf(m[r][b % 2], fmaxf(s_[4 * b + 2 * r], s_[4 * b + 2 * r + 1]));
#pragma unroll
    for (int r = first; r < first + kRowsAtOnce; ++r) {
      float x = fmaxf(m[r][0], m[r][1]);
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      offset_[r] = kMasked ? exp2_reference(x * scale) : x * scale;
      output_rescale_[r] = rescale_[r] = ptx::exp2(max_[r] * scale - offset_[r]);
      max_[r] = x;
    }
  }

  // The same rows of S become P, unnormalised; the running sum.
  __device__ __forceinline__ void exponentiate(int first) {
    const float scale = score_scale();
    float sums[2][2] = {};
#pragma unroll
    for (int b = 0; b < kKeys / 8; ++b)
#pragma unroll
      for (int r = first; r < first + kRowsAtOnce; ++r) {
        float &x = s_[4 * b + 2 * r], &y = s_[4 * b + 2 * r + 1];
        x = ptx::exp2(x * scale - offset_[r]), y = ptx::exp2(y * scale - offset_[r]);
        if constexpr (!Traits::kSteadyReference) sums[r][b % 2] += x + y;
        if constexpr (Traits::kEarlyOutput) pack(b, r);
      }
    if constexpr (Traits::kSteadyReference) return;
#pragma unroll
    for (int r = first; r < first + kRowsAtOnce; ++r) sum_[r] = sum_[r] * rescale_[r] + (sums[r][0] + sums[r][1]);
  }

  // Element i of S against the reference as it is.
  __device__ __forceinline__ float probability(int i) const {
    return ptx::exp2(s_[i] * score_scale() - offset_[i / 2 % 2]);
  }

  // Multiplies the columns of S with the key scales of the step.
  __device__ __forceinline__ void scale_scores() {
    const uint32_t scales = smem_.scales(key().slot()) + lane() % 4 * 16;
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint4 x = ptx::load_shared_v4(scales + i * 64);
      const uint32_t factors[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) s_[8 * i + j] *= __uint_as_float(factors[j / 4 * 2 + j % 2]);
    }
  }
  // The unit of the value scales grows, and with it that of O.
  __device__ __forceinline__ void change_unit() {
    if (!token_scales()) return;
    const uint2 x = ptx::load_shared_v2(smem_.scales(key().slot()) + Traits::kUnitOffset);
    value_unit_ = __uint_as_float(x.x);
    output_rescale_[0] *= __uint_as_float(x.y), output_rescale_[1] *= __uint_as_float(x.y);
  }
  // The value scales of the step, of two columns in every 8.
  __device__ __forceinline__ void load_value_scales() {
    if constexpr (!Traits::kTokenScales) return;
#pragma unroll
    for (uint32_t& x : value_scales_) x = 0x3c003c00u;  // 1
    if (!token_scales()) return;
    const uint32_t scales = smem_.scales(key().slot()) + Traits::kValueScaleOffset + lane() % 4 * 16;
#pragma unroll
    for (int i = 0; i < kKeys / 8; i += 4) {
      const uint4 x = ptx::load_shared_v4(scales + i * 16);
      value_scales_[i] = x.x, value_scales_[i + 1] = x.y, value_scales_[i + 2] = x.z, value_scales_[i + 3] = x.w;
    }
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(smem_.scales_empty(key().slot()));
  }
  // Columns 8 b and on of row r of the thread.
  __device__ __forceinline__ void pack(int b, int r) {
    uint32_t& p = p_frag_[2 * b + r];
    p = ptx::pack<T>(s_[4 * b + 2 * r], s_[4 * b + 2 * r + 1]);
    if constexpr (Traits::kTokenScales) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(p) : "r"(value_scales_[b]));
  }
  __device__ __forceinline__ void pack() {
    load_value_scales();
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) pack(i / 2, i % 2);
  }

  uint32_t steps_ = 0;  // done with Q K, over all tiles

  float s_[kKeys / 2];                                           // scores, then probabilities
  uint32_t value_scales_[Traits::kTokenScales ? kKeys / 8 : 1];  // fp16
  uint32_t p_frag_[kKeys / 4];                                   // packed probabilities, as the A operand of P V
  float offset_[2], rescale_[2], output_rescale_[2];
};

}  // namespace paged_attn::sm90
