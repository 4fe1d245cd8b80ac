// The rows of a consumer thread, and their end: pieces of a tile merged, rows normalised and written.
//
// Accumulator element 4b + e (e = 0, 1) of lane l is row l / 4, column 8b + 2 (l % 4) + e of the warp's 16 rows;
// element 4b + 2 + e is row l / 4 + 8.  So a thread has two rows, "0" and "1", shared by four neighbouring lanes.
#pragma once

#include "../ptx.cuh"
#include "../softmax.cuh"
#include "prefill_load.cuh"

namespace paged_attn::sm90 {

template <class Traits>
class PrefillRows {
 protected:
  using T = typename Traits::T;
  static constexpr int kHeadDim = Traits::kHeadDim;
  // Named barriers, one a warpgroup each.
  static constexpr int kTurnBarrier = 1, kWarpgroupBarrier = kTurnBarrier + Traits::kConsumers;

  __device__ __forceinline__ PrefillRows(const PrefillParams& p, PrefillSmem<Traits> smem)
      : p_(p), smem_(smem), tiles_{smem} {}

  __device__ __forceinline__ int warpgroup() const { return threadIdx.x / 128 - Traits::kFirstConsumer; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32 % 4; }  // of the warpgroup
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  __device__ __forceinline__ void warpgroup_sync() { ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup(), 128); }

  // Rows of the tile: the first of the warp, and the two of the thread.
  __device__ __forceinline__ int warp_row() const { return warpgroup() * kWarpgroupRows + warp() * 16; }
  __device__ __forceinline__ int thread_row(int which) const { return warp_row() + lane() / 4 + which * 8; }

  __device__ __forceinline__ RingPosition<Traits::kQueryBuffers> query() const {
    uint32_t count = tiles_.position.count;
    forget(count);  // addresses and descriptors of Q over the steps
    return {count};
  }
  __device__ __forceinline__ void release_query() {
    ptx::mbarrier_arrive(smem_.query_empty(query().slot(), warpgroup()));
  }

  __device__ __forceinline__ bool token_scales() const { return has_token_scales<Traits>(p_); }
  __device__ __forceinline__ float score_scale() const {
    if constexpr (Traits::kScoreMods) return p_.cap_log2 > 0.f && !p_.attention.alibi_slopes ? p_.cap_log2 : 1.f;
    return Traits::kTokenScales ? p_.scale_log2 : scale_;
  }

  __device__ __forceinline__ uint32_t pack_output(float low, float high) const {
    if (Traits::kQuantized && p_.attention.dtype == DType::kBFloat16) return ptx::pack<__nv_bfloat16>(low, high);
    return ptx::pack<T>(low, high);
  }

  __device__ __forceinline__ void finish_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
    }
    if constexpr (!Traits::kQueryInRegisters) warpgroup_sync();  // the other warps are done with Q
    const TilePieces pieces = tiles_.pieces();
    if (pieces.count == 1 || merge_pieces(pieces)) write_rows();
    if constexpr (!Traits::kReleasesQuery) release_query();
  }

  // Leaves the warp's rows of a piece in memory.  The piece that comes last returns true and holds the sum of all, in
  // their order: the bits do not depend on which one it is.
  __device__ __forceinline__ bool merge_pieces(const TilePieces& pieces) {
    constexpr int kVectors = kHeadDim / 8;
    int thread = threadIdx.x - 128 * Traits::kFirstConsumer;
    forget(thread);
    const auto partial = [&](int slot) {
      return p_.partials + (int64_t{slot} * kRowWarps + thread / 32) * (kVectors + 1) * 32 + thread % 32;
    };
    float4* const mine = partial(pieces.slot);
    const float unit = token_scales() ? value_unit_ : 1.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      __stcg(mine + i * 32, {o_[4 * i] * unit, o_[4 * i + 1] * unit, o_[4 * i + 2] * unit, o_[4 * i + 3] * unit});
    __stcg(mine + kVectors * 32, {max_[0], max_[1], sum_[0], sum_[1]});
    __threadfence();
    __syncwarp();
    unsigned* const arrivals = p_.arrivals + pieces.first_slot * kRowWarps + thread / 32;
    const int before = __shfl_sync(~0u, lane() == 0 ? static_cast<int>(atomicAdd(arrivals, 1u) + 1u) : 0, 0);
    if (before + 1 < pieces.count) return false;
    if (lane() == 0) *arrivals = ~0u;
    __threadfence();

    const float scale = score_scale();
    max_[0] = max_[1] = -INFINITY;
    for (int i = 0; i < pieces.count; ++i) {
      const float4 state = __ldcg(partial(pieces.first_slot + i) + kVectors * 32);
      max_[0] = fmaxf(max_[0], state.x), max_[1] = fmaxf(max_[1], state.y);
    }
    value_unit_ = 1.f;
    sum_[0] = sum_[1] = 0.f;
#pragma unroll
    for (float& x : o_) x = 0.f;
    for (int i = 0; i < pieces.count; ++i) {
      const float4* const other = partial(pieces.first_slot + i);
      const float4 state = __ldcg(other + kVectors * 32);
      const float a = ptx::exp2(state.x * scale - exp2_reference(max_[0] * scale));
      const float b = ptx::exp2(state.y * scale - exp2_reference(max_[1] * scale));
      sum_[0] += a * state.z, sum_[1] += b * state.w;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 x = __ldcg(other + v * 32);
        o_[4 * v] += a * x.x, o_[4 * v + 1] += a * x.y;
        o_[4 * v + 2] += b * x.z, o_[4 * v + 3] += b * x.w;
      }
    }
    return true;
  }

  // Normalises, and writes output and LSE.
  __device__ __forceinline__ void write_rows() {
    const AttentionParams& a = p_.attention;
    const TileRows tile = tiles_.rows();
    float output_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const TokenHead at = row_of(p_, tile, thread_row(r));
      const int head = tile.kv_head * p_.group + at.head;
      const RowEnd end = finish_row(max_[r] * score_scale(), sum_[r], a.sinks ? a.sinks + head : nullptr);
      output_scale[r] = end.output_scale;
      output_scale[r] *= head_scale(a.v_scale, tile.kv_head);
      if (token_scales()) output_scale[r] *= value_unit_;
      if (a.lse && lane() % 4 == 0 && at.token < tile.q_len)
        a.lse[static_cast<int64_t>(tile.q_begin + at.token) * a.num_heads + head] = end.lse;
    }

    if constexpr (Traits::kReleasesQuery)
      write_from_registers(output_scale);
    else
      write_staged(output_scale);
  }

  // Through this warpgroup's part of the query buffer, then whole rows.
  __device__ __forceinline__ void write_staged(const float (&output_scale)[2]) {
    const AttentionParams& a = p_.attention;
    const TileRows tile = tiles_.rows();
    const uint32_t staging = smem_.query(query().slot(), warpgroup()) + warp() * 16 * 128;
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      const int b = i / 2, r = i % 2;
      const uint32_t address = staging + b / 8 * Traits::kQueryPartBytes + r * 1024 + lane() / 4 * 128 +
                               ((b % 8) ^ (lane() / 4)) * 16 + lane() % 4 * 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(address),
                   "r"(pack_output(o_[2 * i] * output_scale[r], o_[2 * i + 1] * output_scale[r]))
                   : "memory");
    }
    __syncwarp();
    constexpr int kLanes = Traits::kChunkLanes, kRowsAtOnce = 32 / kLanes;
    const int chunk = lane() % kLanes;
    T* out = static_cast<T*>(a.out) + tile.q_begin * a.out_strides.token +
             static_cast<int64_t>(tile.kv_head) * p_.group * a.out_strides.head + chunk * 8;
#pragma unroll
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
      const int r = i * kRowsAtOnce + lane() / kLanes;
      const TokenHead at = row_of(p_, tile, warp_row() + r);
      const uint4 v =
          ptx::load_shared_v4(staging + chunk / 8 * Traits::kQueryPartBytes + r * 128 + ((chunk ^ r) % 8) * 16);
      if (at.token < tile.q_len && chunk * 8 < a.head_dim)
        *reinterpret_cast<uint4*>(out + at.token * a.out_strides.token + at.head * a.out_strides.head) = v;
    }
  }

  // Of 32 columns a lane has 2 in every 8 and writes 8, after a transposition among four lanes.
  __device__ __forceinline__ void write_from_registers(const float (&output_scale)[2]) {
    const AttentionParams& a = p_.attention;
    const TileRows tile = tiles_.rows();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const TokenHead at = row_of(p_, tile, thread_row(r));
      T* out = static_cast<T*>(a.out) + (tile.q_begin + at.token) * a.out_strides.token +
               (static_cast<int64_t>(tile.kv_head) * p_.group + at.head) * a.out_strides.head + lane() % 4 * 8;
#pragma unroll
      for (int b = 0; b < kHeadDim / 8; b += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = pack_output(o_[4 * (b + i) + 2 * r] * output_scale[r], o_[4 * (b + i) + 2 * r + 1] * output_scale[r]);
        transpose_quad(x);
        if (at.token < tile.q_len && (b + lane() % 4) * 8 < a.head_dim)
          *reinterpret_cast<uint4*>(out + b * 8) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  // x[i] of lane j becomes x[j] of lane i, of every four lanes.
  __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
    for (int d = 1; d <= 2; d *= 2) {
      const bool upper = lane() & d;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & d) continue;
        const uint32_t received = __shfl_xor_sync(~0u, upper ? x[i] : x[i + d], d);
        if (upper)
          x[i] = received;
        else
          x[i + d] = received;
      }
    }
  }

  const PrefillParams& p_;
  const PrefillSmem<Traits> smem_;
  TileRing<Traits> tiles_;
  float o_[kHeadDim / 2];
  float max_[2], sum_[2];
  float scale_;       // of scores, that of the keys included
  float value_unit_;  // of O, with value scales per token
};

}  // namespace paged_attn::sm90
