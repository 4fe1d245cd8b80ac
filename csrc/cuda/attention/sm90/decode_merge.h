// Partial results: how the warps of a CTA, and the CTAs that share an item, become one row of output.
//
// The merge is in band: a partial needs no counter and no fence, its own words say whether they are there.  Empty slots
// hold 0xffffffff, a NaN that no instruction produces; the CTA of an item's last piece polls until every word is
// something else, and clears what it read.  So the workspace is as it was when the kernel ends.
//
// No deadlock: a CTA waits only at its end, and only for pieces of lower-numbered CTAs.  The hardware starts CTAs in
// order of their index (what decoupled look-back scans rely on too), so all of those have started, hold their SM, and
// themselves wait for lower numbers alone: CTA 0 waits for nobody.  This needs no room for the whole grid at once: with
// fewer free SMs, under MPS or beside other streams, later CTAs simply start later.  A kernel launched early
// (programmatic dependent launch) takes no SM from a CTA that is waited for: it may start only when every CTA of this
// grid has.
#pragma once

#include "../softmax.cuh"
#include "decode_schedule.h"

namespace paged_attn::sm90 {

constexpr unsigned kEmptyWord = 0xffffffffu;
constexpr float kNoMaximum = -1e30f;  // finite, so that the difference of two is not NaN

__device__ __forceinline__ bool is_empty(float x) { return __float_as_uint(x) == kEmptyWord; }
__device__ __forceinline__ bool is_empty(float2 v) { return is_empty(v.x) || is_empty(v.y); }
__device__ __forceinline__ bool is_empty(float4 v) {
  return max(max(__float_as_uint(v.x), __float_as_uint(v.y)), max(__float_as_uint(v.z), __float_as_uint(v.w))) ==
         kEmptyWord;
}
__device__ __forceinline__ float4 load_relaxed(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_relaxed(const float2* p) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(float4* p, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_relaxed(float2* p, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(v.x), "f"(v.y) : "memory");
}

// One row of output over some keys, held by a warp: lane l has the columns 4l .. 4l + 3 (and those 128 further on).
template <int kHeadDim>
struct Partial {
  static constexpr int kVectors = (kHeadDim + 127) / 128;
  float4 o[kVectors];  // unnormalised, relative to `max`
  float max, sum;      // max in log2 units

  __device__ __forceinline__ static bool has(int vector) {
    return kHeadDim % 128 == 0 || vector * 32 + threadIdx.x % 32 < kHeadDim / 4;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kVectors; v++) o[v] = make_float4(0.f, 0.f, 0.f, 0.f);
    max = kNoMaximum, sum = 0.f;
  }
  __device__ __forceinline__ void raise_max(float new_max) {  // new_max >= max
    const float f = ptx::exp2(max - new_max);
#pragma unroll
    for (int v = 0; v < kVectors; v++) o[v].x *= f, o[v].y *= f, o[v].z *= f, o[v].w *= f;
    sum *= f, max = new_max;
  }
  __device__ __forceinline__ void add(int v, float4 x, float weight) {
    o[v].x += x.x * weight, o[v].y += x.y * weight, o[v].z += x.z * weight, o[v].w += x.w * weight;
  }
};

// The packed rows of a (sequence, KV head): row r is query token r / group, head r % group of the group.
struct RowMap {
  int query_begin, kv_head, group;
  unsigned inverse;  // DecodeArgs::group_inverse
  __device__ __forceinline__ int token(int row) const { return row * inverse >> 16; }
  __device__ __forceinline__ int head(int row) const { return row - token(row) * group; }
};

// Normalise and write a finished row, by a warp.
template <class Traits>
__device__ __forceinline__ void write_row(const DecodeArgs& a, const RowMap& rows, int row,
                                          const Partial<Traits::kHeadDim>& x, bool store) {
  const AttentionParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const int head = rows.kv_head * a.group + rows.head(row);
  const int64_t token = rows.query_begin + rows.token(row);
  const RowEnd end = finish_row(x.max, x.sum, p.sinks ? p.sinks + head : nullptr);
  if (p.lse && lane == 0 && store) p.lse[token * p.num_heads + head] = end.lse;
  float factor = end.output_scale;
  if (Traits::kQuantized && !Traits::kTokenScales && p.v_scale.data)
    factor *= __ldg(p.v_scale.data + rows.kv_head * p.v_scale.strides.head);
  using Half = __half;
  using BFloat = __nv_bfloat16;
  const bool is_bfloat =
      std::is_same_v<typename Traits::Cache, BFloat> || (Traits::kQuantized && p.dtype == DType::kBFloat16);
  uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_strides.token + head * p.out_strides.head;
#pragma unroll
  for (int v = 0; v < x.kVectors; v++) {
    if (!x.has(v) || !store) continue;
    const float4 y = make_float4(x.o[v].x * factor, x.o[v].y * factor, x.o[v].z * factor, x.o[v].w * factor);
    *reinterpret_cast<uint2*>(out + v * 128 + lane * 4) =
        is_bfloat ? make_uint2(ptx::pack<BFloat>(y.x, y.y), ptx::pack<BFloat>(y.z, y.w))
                  : make_uint2(ptx::pack<Half>(y.x, y.y), ptx::pack<Half>(y.z, y.w));
  }
}

// Where a warp's lane finds its part of a row in a slot; slots are kSlotVectors and kSlotRows apart.
template <class Traits>
struct SlotRow {
  static constexpr int kSlotRows = Traits::kHeads * Traits::kRows, kSlotVectors = kSlotRows * Traits::kHeadDim / 4;
  float4* out;
  float2* stats;
  // `row` counts within the slot: head slot * kRows + packed row.
  __device__ __forceinline__ SlotRow(const DecodeArgs& a, int slot, int row) {
    const int r = slot * kSlotRows + row;
    out = reinterpret_cast<float4*>(a.partial_out) + r * (Traits::kHeadDim / 4) + threadIdx.x % 32;
    stats = a.partial_stats + r;
  }
};

template <class Traits>
__device__ __forceinline__ void publish(const SlotRow<Traits>& to, const Partial<Traits::kHeadDim>& x) {
#pragma unroll
  for (int v = 0; v < x.kVectors; v++)
    if (x.has(v)) store_relaxed(to.out + v * 32, x.o[v]);
  if (threadIdx.x % 32 == 0) store_relaxed(to.stats, make_float2(x.max, x.sum));
}

// What this warp has published itself, taken back.
template <class Traits>
__device__ __forceinline__ void take_back(const SlotRow<Traits>& from, Partial<Traits::kHeadDim>& x) {
  __syncwarp();
  const float e = __uint_as_float(kEmptyWord);
  const float2 s = load_relaxed(from.stats);
  x.max = s.x, x.sum = s.y;
#pragma unroll
  for (int v = 0; v < x.kVectors; v++)
    if (x.has(v)) x.o[v] = load_relaxed(from.out + v * 32), store_relaxed(from.out + v * 32, make_float4(e, e, e, e));
  __syncwarp();
  if (threadIdx.x % 32 == 0) store_relaxed(from.stats, make_float2(e, e));
}

// Adds the row's pieces in `count` slots from `from` on to x, in order, and clears them; by a warp.  Lane k polls the
// statistics of piece k of a round; all words of a round are requested at once and asked for again together.
template <class Traits>
__device__ __forceinline__ void merge_published(SlotRow<Traits> from, int count, Partial<Traits::kHeadDim>& x) {
  using Slot = SlotRow<Traits>;
  constexpr int kVectors = Partial<Traits::kHeadDim>::kVectors;
  constexpr bool kFew = Traits::kRows > (Traits::kQuantized ? 8 : 16);
  constexpr int kMany = !kFew ? 8 / kVectors : Traits::kQuantized && Traits::kRows > 16 ? 2 : 4;
  constexpr int kRound = Traits::kWarps < 8 ? 16 / kVectors : kMany;  // what fits registers
  const int lane = threadIdx.x % 32;
  const float e = __uint_as_float(kEmptyWord);
  float2* stats = from.stats + lane * Slot::kSlotRows;
#pragma unroll 1
  do {
    float2 s = make_float2(kNoMaximum, 0.f);
    float4 o[kRound][kVectors];
    if (lane < min(kRound, count)) s = load_relaxed(stats);
#pragma unroll
    for (int k = 0; k < kRound; k++)
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        o[k][v] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (k < count && x.has(v)) o[k][v] = load_relaxed(from.out + k * Slot::kSlotVectors + v * 32);
      }
    for (;;) {
      bool wait = is_empty(s);
#pragma unroll
      for (int k = 0; k < kRound; k++)
#pragma unroll
        for (int v = 0; v < kVectors; v++) wait |= is_empty(o[k][v]);
      if (!__any_sync(~0u, wait)) break;
      if (is_empty(s)) s = load_relaxed(stats);
#pragma unroll
      for (int k = 0; k < kRound; k++)
#pragma unroll
        for (int v = 0; v < kVectors; v++)
          if (is_empty(o[k][v])) o[k][v] = load_relaxed(from.out + k * Slot::kSlotVectors + v * 32);
    }
    float max = fmaxf(s.x, x.max);
#pragma unroll
    for (int d = kRound / 2; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
    max = __shfl_sync(~0u, max, 0);
    const float weight = ptx::exp2(s.x - max);
    float sum = weight * s.y;
#pragma unroll
    for (int d = kRound / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    x.raise_max(max);
    x.sum += __shfl_sync(~0u, sum, 0);
#pragma unroll
    for (int k = 0; k < kRound; k++) {
      const float w = __shfl_sync(~0u, weight, k);
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        x.add(v, o[k][v], w);
        if (k < count && x.has(v)) store_relaxed(from.out + k * Slot::kSlotVectors + v * 32, make_float4(e, e, e, e));
      }
    }
    if (lane < min(kRound, count)) store_relaxed(stats, make_float2(e, e));
    from.out += kRound * Slot::kSlotVectors;
    stats += kRound * Slot::kSlotRows;
    count -= kRound;
  } while (count > 0);
  __syncwarp();  // cleared before any lane publishes here again
}

}  // namespace paged_attn::sm90
