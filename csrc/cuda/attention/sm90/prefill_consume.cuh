// A consumer warpgroup: 64 rows of a tile against all of its keys.
//
// Step j: issue S = Q K_j, issue O += P V_(j+1), wait for S, softmax(S) while P V runs, wait for it, rescale O, pack P.
// With kEarlyOutput O is waited for once the maxima of S are found, since P V has ended by then: the rest is one
// stretch of arithmetic in which the special functions never pause.  The two warpgroups take turns in issuing, so that
// one does softmax while the other has the tensor cores.  Where softmax is longer than the products (kLateTurn), a turn
// lasts until the maxima are found, which keeps the warpgroups half a step apart.
#pragma once

#include "../widen.cuh"
#include "prefill_rows.cuh"
#include "prefill_wgmma.cuh"

namespace paged_attn::sm90 {

// Two elements of Q as operands beside an 8-bit cache.  They take the sign of the key scale, so that the largest
// product is the largest score.
struct QueryConversion {
  bool is_bfloat;
  uint32_t signs;
  __device__ __forceinline__ QueryConversion(const PrefillParams& p, float key_scale)
      : is_bfloat(p.attention.dtype == DType::kBFloat16), signs(key_scale < 0.f ? 0x80008000u : 0u) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t x) const { return to_half2(x, is_bfloat) ^ signs; }
};

template <class Traits>
class PrefillConsumer : PrefillRows<Traits> {
  using Rows = PrefillRows<Traits>;

 public:
  __device__ __forceinline__ PrefillConsumer(const PrefillParams& p, PrefillSmem<Traits> smem) : Rows(p, smem) {}

  __device__ __forceinline__ void run() {
    if (warpgroup() == kConsumers - 1) pass_turn();  // the first warpgroup begins
    while (true) {
      tiles_.wait();
      if (tiles_.rows().seq < 0) break;
      start_rows();
      attend();
      finish_rows();
      tiles_.release();
    }
  }

 private:
  using Rows::kHeadDim, Rows::kTurnBarrier;
  using Rows::p_, Rows::smem_, Rows::tiles_, Rows::o_, Rows::max_, Rows::sum_, Rows::scale_, Rows::value_unit_;
  using Rows::query, Rows::release_query, Rows::token_scales, Rows::score_scale, Rows::finish_rows;
  using Rows::warpgroup, Rows::warp, Rows::lane, Rows::warpgroup_sync, Rows::thread_row;
  using typename Rows::T;
  static constexpr int kKeys = Traits::kKeys, kConsumers = Traits::kConsumers;
  static constexpr int kRowsAtOnce = Traits::kRowsAtOnce;
  // With Q in registers the compiler knows by itself what is uniform; other 8-bit instances lack a register for it.
  static constexpr bool kMakesUniform = !Traits::kQueryInRegisters && (Traits::kTokenScales || !Traits::kQuantized);

  __device__ __forceinline__ void take_turn() { ptx::named_barrier_sync(kTurnBarrier + warpgroup(), 256); }
  __device__ __forceinline__ void pass_turn() {
    ptx::named_barrier_arrive(kTurnBarrier + (warpgroup() + 1) % kConsumers, 256);
  }

  // The values in use are those of the step before.
  __device__ __forceinline__ RingPosition<Traits::kStages> key() const { return {steps_}; }
  __device__ __forceinline__ RingPosition<Traits::kStages> value() const { return {steps_ - 1}; }

  __device__ __forceinline__ void start_rows() {
    if constexpr (!Traits::kTokenScales) scale_ = p_.scale_log2 * fabsf(tiles_.key_scale());
    value_unit_ = 0.f;
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.f;
#pragma unroll
    for (float& x : o_) x = 0.f;
    const uint32_t query_address = smem_.query(query().slot(), warpgroup());
    ptx::mbarrier_wait(smem_.query_full(query().slot(), warpgroup()), query().parity());
    if constexpr (Traits::kQuantized && !Traits::kQueryInRegisters) convert_query(query_address);
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        const int row = warp() * 16 + lane() % 16, chunk = 2 * i + lane() / 16;
        uint32_t (&fragment)[4] = *reinterpret_cast<uint32_t (*)[4]>(q_ + 4 * i);
        ptx::ldmatrix_x4(fragment,
                         query_address + chunk / 8 * Traits::kQueryPartBytes + row * 128 + ((chunk ^ row) % 8) * 16);
      }
      if constexpr (Traits::kQuantized) {
        const QueryConversion to_operand(p_, tiles_.key_scale());
#pragma unroll
        for (uint32_t& x : q_) x = to_operand(x);
      }
      pin(q_);
      if constexpr (Traits::kReleasesQuery) release_query();
    }
  }

  // In place, the rows of this warp.
  __device__ __forceinline__ void convert_query(uint32_t address) {
    const QueryConversion to_operand(p_, tiles_.key_scale());
#pragma unroll 1
    for (int i = lane(); i < Traits::kParts * 128; i += 32) {
      const uint32_t at = address + i / 128 * Traits::kQueryPartBytes + (warp() * 16 + i / 8 % 16) * 128 + i % 8 * 16;
      const uint4 x = ptx::load_shared_v4(at);
      ptx::store_shared_v4(at, to_operand(x.x), to_operand(x.y), to_operand(x.z), to_operand(x.w));
    }
    ptx::fence_proxy_async();
    warpgroup_sync();
  }

  __device__ __forceinline__ void attend() {
    const TileRows tile = tiles_.rows();
    int step = tiles_.steps().last;
    if (step < tiles_.steps().first) return;
    const KeyRange keys = key_range(p_.attention, tile, tile.token, row_of(p_, tile, Traits::kRows - 1).token);
    full_begin_ = max(tiles_.steps().first, (keys.all_begin + kKeys - 1) / kKeys);
    full_end_ = max(keys.all_end, 0) / kKeys;

    issue_scores();
    pass_turn();
    wgmma_wait<0>();
    pin(s_);
    release_key();
    finish_scores<true>(step--);
    change_unit();
    if constexpr (Traits::kEarlyOutput) load_value_scales();
#pragma unroll
    for (int r = 0; r < 2; r += kRowsAtOnce) find_maxima<true>(r), exponentiate(r);
    if constexpr (!Traits::kEarlyOutput) pack();
    ++steps_;
    if constexpr (Traits::kLeanSteps) clear_values(step + 1);
    while (step >= tiles_.steps().first) {
      forget(tiles_.position.count);  // addresses of the tile
      if (!is_full(step)) {
        next_step<true>(step--);
      } else {
        do {  // a loop of their own for the full steps, and a short one, where registers suffice
          next_step<false>(step--);
        } while (Traits::kShortLoop && is_full(step));
      }
    }
    issue_output(step + 1);
    wgmma_wait<0>();
    pin(o_);
    release_value();
  }

  // Every row of the tile sees every key of the step.
  __device__ __forceinline__ bool is_full(int step) const { return step >= full_begin_ && step < full_end_; }

  template <bool kMasked>
  __device__ __forceinline__ void next_step(int step) {
    if constexpr (kMakesUniform) steps_ = uniform(steps_);
    issue_scores();
    issue_output(step + 1);
    if constexpr (!Traits::kLateTurn) pass_turn();
    wgmma_wait<1>();
    pin(s_);
    release_key();
    finish_scores<kMasked>(step);
    if constexpr (Traits::kEarlyOutput) {
      find_maxima<kMasked>(0);
      change_unit();
      if constexpr (Traits::kLateTurn) pass_turn();
      const auto& found = Traits::kLeanSteps ? offset_ : output_rescale_;
      hold<Traits::kProducers == 2>(found[0] + found[kRowsAtOnce - 1]);
      wait_for_output();
      load_value_scales();
#pragma unroll
      for (int r = 0; r < 2; r += kRowsAtOnce) {
        if (r > 0) find_maxima<kMasked>(r);
        rescale_output(r, r + kRowsAtOnce);
        exponentiate(r);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; r += kRowsAtOnce) find_maxima<kMasked>(r), exponentiate(r);
      change_unit();
      hold<Traits::kProducers == 2>(sum_[0] + sum_[1]);
      wait_for_output();
      rescale_output(0, 2);
      pack();
    }
    ++steps_;
    if constexpr (Traits::kLeanSteps && kMasked) clear_values(step);
  }

  __device__ __forceinline__ void wait_for_output() {
    wgmma_wait<0>();
    pin(o_);
    pin(p_frag_);
    release_value();
    // The assembler would put that arrival after all of the softmax, and the stage is waited for by those who convert.
    if constexpr (Traits::kQuantized) hold<Traits::kProducers == 2>(output_rescale_[0]);
  }
  // Of rows begin .. end - 1 of the thread.
  __device__ __forceinline__ void rescale_output(int begin, int end) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i)
      if (i / 2 % 2 >= begin && i / 2 % 2 < end) o_[i] *= output_rescale_[i / 2 % 2];
  }

  __device__ __forceinline__ void issue_scores() {
    ptx::mbarrier_wait(smem_.key_full(key().slot()), key().parity());
    take_turn();
    const uint64_t keys = stage_descriptor(smem_.key(0), key().slot(), 16);
    uint32_t query_address = smem_.query(query().slot(), warpgroup());
    if constexpr (kMakesUniform) query_address = uniform(query_address);
    const uint64_t queries = matrix_descriptor(query_address, 16, 1024);
    pin(s_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const uint64_t b = keys + (i / 4 * Traits::kPartBytes + i % 4 * 32) / 16;
      if constexpr (Traits::kQueryInRegisters)
        Wgmma<kKeys>::template rs<T, 0>(s_, q_ + 4 * i, b, i > 0);
      else
        Wgmma<kKeys>::template ss<T, 0>(s_, queries + (i / 4 * Traits::kQueryPartBytes + i % 4 * 32) / 16, b, i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(int step) {
    ptx::mbarrier_wait(smem_.value_full(value().slot()), value().parity());
    if constexpr (!Traits::kQuantized && !Traits::kLeanSteps)  // else they were cleared before
      if (!is_full(step)) clear_values(step);
    const uint64_t values = stage_descriptor(smem_.value(0), value().slot(), Traits::kPartBytes);
    pin(o_);
    pin(p_frag_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint64_t rows = values + i * 2 * Traits::kRowGroupBytes / 16;
      if constexpr (Traits::kProducers == 2 &&
                    kHeadDim == 256) {  // whole, it takes more registers than threads begin with
        auto& halves = *reinterpret_cast<float (*)[2][64]>(o_);
        Wgmma<128>::template rs<T, 1>(halves[0], p_frag_ + 4 * i, rows, 1);
        Wgmma<128>::template rs<T, 1>(halves[1], p_frag_ + 4 * i, rows + 2 * Traits::kPartBytes / 16, 1);
      } else {
        Wgmma<kHeadDim>::template rs<T, 1>(o_, p_frag_ + 4 * i, rows, 1);
      }
    }
    wgmma_commit();
  }

  // Of K or V, whose first stage is at `stages`.
  __device__ __forceinline__ uint64_t stage_descriptor(uint32_t stages, int slot, int column_stride) const {
    if constexpr (Traits::kLeanSteps)
      return matrix_descriptor(stages, column_stride, Traits::kRowGroupBytes) + slot * (Traits::kStageBytes / 16);
    return matrix_descriptor(stages + slot * Traits::kStageBytes, column_stride, Traits::kRowGroupBytes);
  }

  // Rows of V that are no token's, or that no query token of the sequence sees, may hold NaN, and 0 x NaN is NaN.  They
  // are in masked steps alone.  Both warpgroups clear them, each before its own use.
  __device__ __forceinline__ void clear_values(int step) {
    const TileRows tile = tiles_.rows();
    const int begin = first_visible_key(p_.attention, tile) - step * kKeys, end = tile.seq_len - step * kKeys;
    if (begin <= 0 && end >= kKeys) return;
    if constexpr (Traits::kLeanSteps) ptx::mbarrier_wait(smem_.value_full(value().slot()), value().parity());
    constexpr int kChunks = 8 * Traits::kParts;  // whole parts, since chunks are swizzled
    for (int i = threadIdx.x % 128; i < kKeys * kChunks; i += 128) {
      const int row = i % kKeys, chunk = i / kKeys;
      if (row >= begin && row < end) continue;
      const uint32_t address = smem_.value(value().slot()) + row / 8 * Traits::kRowGroupBytes +
                               chunk / 8 * Traits::kPartBytes + row % 8 * 128 + chunk % 8 * 16;
      ptx::store_shared_v4(address, 0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    warpgroup_sync();
  }

  __device__ __forceinline__ void release_key() {
    if (lane() == 0) ptx::mbarrier_arrive(smem_.key_empty(key().slot()));
  }
  __device__ __forceinline__ void release_value() {
    if (lane() == 0) ptx::mbarrier_arrive(smem_.value_empty(value().slot()));
  }

  // Raw products to scores; in units of log2 once multiplied by score_scale.
  template <bool kMasked>
  __device__ __forceinline__ void modify_scores(int step) {
    const float key_scale = fabsf(tiles_.key_scale());
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
        sums[r][b % 2] += x + y;
        if constexpr (Traits::kEarlyOutput) pack(b, r);
      }
#pragma unroll
    for (int r = first; r < first + kRowsAtOnce; ++r) sum_[r] = sum_[r] * rescale_[r] + (sums[r][0] + sums[r][1]);
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
  uint32_t q_[Traits::kQueryInRegisters ? kHeadDim / 4 : 1];
  float offset_[2], rescale_[2], output_rescale_[2];
  int full_begin_, full_end_;  // steps of this piece that need no mask
};

}  // namespace paged_attn::sm90
