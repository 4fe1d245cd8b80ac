// A consumer warpgroup: 64 rows of a tile against all of its keys.
//
// Step j: issue S = Q K_j, issue O += P V_(j+1), wait for S, softmax(S) while P V runs, wait for it, rescale O, pack P.
// With kEarlyOutput O is waited for once the maxima of S are found, since P V has ended by then: the rest is one
// stretch of arithmetic in which the special functions never pause.  The two warpgroups take turns in issuing, so that
// one does softmax while the other has the tensor cores.  Where softmax is longer than the products (kLateTurn), a turn
// lasts until the maxima are found, which keeps the warpgroups half a step apart.
#pragma once

#include "../widen.cuh"
#include "prefill_softmax.cuh"
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
class PrefillConsumer : PrefillSoftmax<Traits> {
  using Softmax = PrefillSoftmax<Traits>;

 public:
  __device__ __forceinline__ PrefillConsumer(const PrefillParams& p, PrefillSmem<Traits> smem) : Softmax(p, smem) {}

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
  using Softmax::finish_scores, Softmax::find_maxima, Softmax::probability, Softmax::exponentiate, Softmax::change_unit,
      Softmax::load_value_scales, Softmax::pack;
  using Softmax::kHeadDim, Softmax::kKeys, Softmax::kRowsAtOnce, Softmax::kTurnBarrier;
  using Softmax::p_, Softmax::smem_, Softmax::tiles_, Softmax::o_, Softmax::max_, Softmax::sum_, Softmax::scale_,
      Softmax::value_unit_;
  using Softmax::query, Softmax::release_query, Softmax::finish_rows, Softmax::key, Softmax::value;
  using Softmax::steps_, Softmax::s_, Softmax::p_frag_, Softmax::output_rescale_;
  using Softmax::warpgroup, Softmax::warp, Softmax::lane, Softmax::warpgroup_sync;
  using typename Softmax::T;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr uint32_t kMostProbable = std::is_same_v<T, __half> ? 0x7800 : 0x4700;  // 2^15, as an operand of P V
  // With Q in registers the compiler knows by itself what is uniform; other 8-bit instances lack a register for it.
  static constexpr bool kMakesUniform = !Traits::kQueryInRegisters && (Traits::kTokenScales || !Traits::kQuantized);

  __device__ __forceinline__ void take_turn() { ptx::named_barrier_sync(kTurnBarrier + warpgroup(), 256); }
  __device__ __forceinline__ void pass_turn() {
    ptx::named_barrier_arrive(kTurnBarrier + (warpgroup() + 1) % kConsumers, 256);
  }
  // Not before x, which is no NaN of these bits, is known.
  __device__ __forceinline__ void pass_turn(float x) {
    ptx::named_barrier_arrive(kTurnBarrier + (warpgroup() + 1) % kConsumers + (__float_as_uint(x) == ~0u), 256);
  }

  __device__ __forceinline__ void start_rows() {
    if constexpr (Traits::kQuantized && !Traits::kTokenScales) scale_ = p_.scale_log2 * fabsf(tiles_.key_scale());
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
    while (step >= tiles_.steps().first) {
      forget(tiles_.position.count);  // addresses of the tile
      if (!is_full(step)) {
        next_step<true>(step--);
      } else {
        do {  // a loop of their own for the full steps, and a short one, where registers suffice
          if constexpr (Traits::kSteadyReference)
            steady_step(step--);
          else
            next_step<false>(step--);
        } while (Traits::kShortLoop && is_full(step));
      }
    }
    issue_output(step + 1);
    wgmma_wait<0>();
    pin(o_);
    release_value();
    if constexpr (Traits::kSteadyReference)
      for (int r = 0; r < 2; ++r) sum_[r] = o_[kHeadDim / 2 + 2 * r] * 0.25f;  // four lanes have it each
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
      hold<Traits::kProducers == 2>(output_rescale_[0] + output_rescale_[kRowsAtOnce - 1]);
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
  }

  // A full step whose exponents are taken against the reference as it is: no maxima, and O is not rescaled.  Where a
  // probability exceeds kMostProbable, the warp starts the step over.
  __device__ __forceinline__ void steady_step(int step) {
    constexpr int kEarly = 8;  // groups of 8 keys whose exponentials come while P V reads the registers of P
    issue_scores();
    issue_output(step + 1);
    wgmma_wait<1>();
    pin(s_);
    float x[kKeys / 2];
#pragma unroll
    for (int i = 0; i < 4 * kEarly; ++i) x[i] = probability(i);
    pass_turn(x[4 * kEarly - 4] + x[4 * kEarly - 1]);
    hold<false>(x[4 * kEarly - 4] + x[4 * kEarly - 3] + x[4 * kEarly - 2] + x[4 * kEarly - 1]);
    wait_for_output();
    uint32_t largest[2] = {0, 0};  // of pairs of positive numbers, which compare as their bits do
#pragma unroll
    for (int b = 0; b < kKeys / 8; ++b) {
#pragma unroll
      for (int i = 4 * b; i < 4 * b + 4; i += 2) {
        if (b >= kEarly) x[i] = probability(i), x[i + 1] = probability(i + 1);
        p_frag_[i / 2] = ptx::pack<T>(x[i], x[i + 1]);
      }
      largest[b % 2] = __vimax3_u16x2(largest[b % 2], p_frag_[2 * b], p_frag_[2 * b + 1]);
    }
    const uint32_t pair = __vmaxu2(largest[0], largest[1]);
    const bool outgrown = max(pair & 0xffff, pair >> 16) > kMostProbable || fminf(max_[0], max_[1]) == -INFINITY;
    if (__any_sync(~0u, outgrown)) {
      compute_scores();
      find_maxima<false>(0);
      rescale_output(0, 2);
      exponentiate(0);
    }
    release_key();
    ++steps_;
  }
  // S of this warp, without the others of its warpgroup.
  __device__ __forceinline__ void compute_scores() {
    const uint32_t keys = smem_.key(key().slot()) + lane() / 16 * Traits::kRowGroupBytes + lane() % 8 * 128;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const uint32_t (&query)[4] = *reinterpret_cast<uint32_t (*)[4]>(q_ + 4 * i);
      const int chunk = 2 * i + lane() / 8 % 2;
#pragma unroll
      for (int b = 0; b < kKeys / 8; b += 2) {
        float (&s)[2][4] = *reinterpret_cast<float (*)[2][4]>(s_ + 4 * b);
        pin(s[0]), pin(s[1]);  // one after the other, for want of registers
        uint32_t k[4];
        ptx::ldmatrix_x4(k, keys + b * Traits::kRowGroupBytes + ((chunk ^ lane()) % 8) * 16);
        if (i == 0)
          for (int j = 0; j < 8; ++j) s[j / 4][j % 4] = 0.f;
        ptx::mma_m16n8k16<T>(s[0], query, k[0], k[1]);
        ptx::mma_m16n8k16<T>(s[1], query, k[2], k[3]);
      }
    }
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
    for (int i = 0; i < Traits::kOutputColumns / 2; ++i)
      if (i / 2 % 2 >= begin && i / 2 % 2 < end) o_[i] *= output_rescale_[i / 2 % 2];
  }

  __device__ __forceinline__ void issue_scores() {
    ptx::mbarrier_wait(smem_.key_full(key().slot()), key().parity());
    take_turn();
    const uint64_t keys = matrix_descriptor(smem_.key(key().slot()), 16, Traits::kRowGroupBytes);
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
    if constexpr (!Traits::kQuantized)  // else they were cleared when they were converted
      if (!is_full(step)) clear_values(step);
    // The ones are the same for all keys, so that V comes nearer to them from product to product.
    constexpr int kRowsStep = 2 * Traits::kRowGroupBytes / 16;
    constexpr int64_t kNextRows = Traits::kSteadyReference ? kRowsStep - kRowsStep * 65536 : kRowsStep;
    const uint32_t address = smem_.value(value().slot());
    const uint64_t values = matrix_descriptor(
        address, Traits::kSteadyReference ? smem_.ones() - address : Traits::kPartBytes, Traits::kRowGroupBytes);
    pin(o_);
    pin(p_frag_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint64_t rows = values + i * kNextRows;
      if constexpr (Traits::kProducers == 2 &&
                    kHeadDim == 256) {  // whole, it takes more registers than threads begin with
        auto& halves = *reinterpret_cast<float (*)[2][64]>(o_);
        Wgmma<128>::template rs<T, 1>(halves[0], p_frag_ + 4 * i, rows, 1);
        Wgmma<128>::template rs<T, 1>(halves[1], p_frag_ + 4 * i, rows + 2 * Traits::kPartBytes / 16, 1);
      } else {
        Wgmma<Traits::kOutputColumns>::template rs<T, 1>(o_, p_frag_ + 4 * i, rows, 1);
      }
    }
    wgmma_commit();
  }

  // Rows of V that are no token's, or that no query token of the sequence sees, may hold NaN, and 0 x NaN is NaN.  Both
  // warpgroups clear them, each before its own use.
  __device__ __forceinline__ void clear_values(int step) {
    const TileRows tile = tiles_.rows();
    const int begin = first_visible_key(p_.attention, tile) - step * kKeys, end = tile.seq_len - step * kKeys;
    if (begin <= 0 && end >= kKeys) return;
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

  uint32_t q_[Traits::kQueryInRegisters ? kHeadDim / 4 : 1];
  int full_begin_, full_end_;  // steps of this piece that need no mask
};

}  // namespace paged_attn::sm90
