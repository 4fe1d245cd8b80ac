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

// An item as its end sees it.
struct Item {
  Pieces pieces;
  RowMap rows;
  int num_rows;
  float value_scale;
};

// Where a finished row goes.
struct RowPlace {
  uint16_t* out;
  int64_t lse;  // index
  int head;

  __device__ __forceinline__ static RowPlace of(const DecodeArgs& a, const RowMap& rows, int row) {
    const AttentionParams& p = a.p;
    const int64_t token = rows.query_begin + rows.token(row);
    const int head = rows.kv_head * a.group + rows.head(row);
    uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_strides.token + head * p.out_strides.head;
    return {out + threadIdx.x % 32 * 4, token * p.num_heads + head, head};
  }
};

// Normalise and write a finished row, by a warp.
template <class Traits>
__device__ __forceinline__ void write_row(const DecodeArgs& a, const RowPlace& place,
                                          const Partial<Traits::kHeadDim>& x, float value_scale) {
  const AttentionParams& p = a.p;
  const auto end = [&] { return finish_row(x.max, x.sum, p.sinks ? p.sinks + place.head : nullptr); };
  const float factor = end().output_scale * value_scale;
  using Half = __half;
  using BFloat = __nv_bfloat16;
  const bool is_bfloat =
      std::is_same_v<typename Traits::Cache, BFloat> || (Traits::kQuantized && p.dtype == DType::kBFloat16);
#pragma unroll
  for (int v = 0; v < x.kVectors; v++) {
    if (!x.has(v)) continue;
    const float4 y = make_float4(x.o[v].x * factor, x.o[v].y * factor, x.o[v].z * factor, x.o[v].w * factor);
    const uint32_t low = is_bfloat ? ptx::pack<BFloat>(y.x, y.y) : ptx::pack<Half>(y.x, y.y);
    const uint32_t high = is_bfloat ? ptx::pack<BFloat>(y.z, y.w) : ptx::pack<Half>(y.z, y.w);
    *reinterpret_cast<uint64_t*>(place.out + v * 128) = static_cast<uint64_t>(high) << 32 | low;
  }
  if (p.lse && threadIdx.x % 32 == 0) p.lse[place.lse] = end().lse;  // no logarithm if there is none
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

// Floats and these integers have the same order.
__device__ __forceinline__ int ordered(int float_bits) { return float_bits ^ (float_bits >> 31 & 0x7fffffff); }
__device__ __forceinline__ float warp_max(float x) {
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

// Adds the published pieces of the rows `row`, row + kSlices, ... (num_rows of them) of an item to `x`, in order, and
// clears them; by a warp.  A lane polls the statistics of one piece of one row.  The values of the first kBatch pieces
// are requested together with them and asked for again together, further ones once these are added; kFew: there are
// none.  `place`: of the only row, if kEndRows is 1.
template <class Traits, int kBatch, bool kFew>
__device__ __forceinline__ void add_published(const DecodeArgs& a, const Item& item, int first_slot_row, int row,
                                              int num_rows, Partial<Traits::kHeadDim> (&x)[Traits::kEndRows],
                                              RowPlace& place) {
  using Slot = SlotRow<Traits>;
  constexpr int kRows = Traits::kEndRows, kVectors = Partial<Traits::kHeadDim>::kVectors;
  constexpr int kRound = 32 / kRows;  // pieces whose statistics are polled together
  const int lane = threadIdx.x % 32, my_row = lane / kRound, my_piece = lane % kRound;
  const float e = __uint_as_float(__ballot_sync(~0u, true));  // kEmptyWord, in a register that is not made anew
  const float4 empty = make_float4(e, e, e, e);
  Slot from(a, item.pieces.base, first_slot_row + row);
  Slot at(a, item.pieces.first_slot, first_slot_row + row);  // the first slot of a batch
  float4 o[kBatch][kRows][kVectors];
  // f(o, piece, row, its place in the slots) for the pieces of a batch; if there are few, for half of it.
  const auto each = [&](int count, auto&& f) {
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      if (!kFew && k == kBatch / 2 && count <= kBatch / 2) break;
#pragma unroll
      for (int i = 0; i < kRows; i++)
#pragma unroll
        for (int v = 0; v < kVectors; v++)
          f(o[k][i][v], k, i, v,
            (k == 0 ? at.out : from.out + k * Slot::kSlotVectors) + i * (Traits::kSlices * Traits::kHeadDim / 4) +
                v * 32);
    }
  };
#pragma unroll 1
  for (int round = 0; round < item.pieces.count; round += kRound) {
    const int round_count = kFew ? item.pieces.count : min(item.pieces.count - round, kRound);
    const bool polls = my_piece < round_count && my_row < num_rows;
    float2* stats = (my_piece == 0 ? at.stats : from.stats + my_piece * Slot::kSlotRows) + my_row * Traits::kSlices;
    float2 s = make_float2(kNoMaximum, 0.f);
    float weight = 0.f;
    if (polls) s = load_relaxed(stats);
#pragma unroll 1
    for (int first = 0; first < round_count; first += kBatch) {
      const int count = round_count - first;
      const auto has = [&](int k, int i, int v) { return k < count && i < num_rows && x[i].has(v); };
      each(count, [&](float4& value, int k, int i, int v, float4* p) {
        value = make_float4(0.f, 0.f, 0.f, 0.f);
        if (has(k, i, v)) value = load_relaxed(p);
      });
      if (kRows == 1 && (kFew || round + first == 0)) {  // while the first values are on their way
        int r = row;
        asm volatile("" : "+r"(r));  // not before
        place = RowPlace::of(a, item.rows, r);
        asm volatile("" : "+l"(place.out));  // not after
      }
      for (;;) {
        bool wait = is_empty(s);
        each(count, [&](float4& value, int, int, int, float4*) { wait |= is_empty(value); });
        if (!__any_sync(~0u, wait)) break;
        if (is_empty(s)) s = load_relaxed(stats);
        each(count, [&](float4& value, int, int, int, float4* p) {
          if (is_empty(value)) value = load_relaxed(p);
        });
      }
      if (kFew || first == 0) {
        float my_max = 0.f;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          const float max = warp_max(my_row == i ? fmaxf(s.x, x[i].max) : -INFINITY);
          x[i].raise_max(max);
          my_max = my_row == i ? max : my_max;
        }
        weight = ptx::exp2(s.x - my_max);
        float sum = s.y * weight;
#pragma unroll
        for (int d = 1; d < (kFew ? kBatch : kRound); d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
#pragma unroll
        for (int i = 0; i < kRows; i++) x[i].sum += __shfl_sync(~0u, sum, i * kRound);
        if (polls) store_relaxed(stats, make_float2(e, e));
      }
      each(count, [&](float4& value, int k, int i, int v, float4* p) {
        x[i].add(v, value, __shfl_sync(~0u, weight, i * kRound + first + k));
        if (has(k, i, v)) store_relaxed(p, empty);
      });
      if (kFew) return;
      from.out += kBatch * Slot::kSlotVectors, at.out = from.out;
    }
    from.stats += kRound * Slot::kSlotRows, at.stats = from.stats;
  }
}

// Takes the published pieces of rows, as add_published does, and writes the rows.
template <class Traits>
__device__ __forceinline__ void take_published(const DecodeArgs& a, const Item& item, int first_slot_row, int row,
                                               int num_rows) {
  constexpr int kRows = Traits::kEndRows, kVectors = Partial<Traits::kHeadDim>::kVectors;
  constexpr int kValues = Traits::kWarps == 4 || Traits::kMoreRegisters || kRows * kVectors == 1 ? 16 : 8;  // held
  constexpr int kBatch = kValues / kRows / kVectors, kFew = 8;                                              // pieces
  Partial<Traits::kHeadDim> x[kRows];
  RowPlace place;
#pragma unroll
  for (int i = 0; i < kRows; i++) x[i].clear();
  // Straight code for few pieces, as short calls have: there every instruction is executed once, and jumps are slow.
  if (kBatch <= kFew || item.pieces.count > kBatch)
    add_published<Traits, kBatch, false>(a, item, first_slot_row, row, num_rows, x, place);
  else if (item.pieces.count > kFew)
    add_published<Traits, kBatch, true>(a, item, first_slot_row, row, num_rows, x, place);
  else
    add_published<Traits, kFew, true>(a, item, first_slot_row, row, num_rows, x, place);
#pragma unroll
  for (int i = 0; i < kRows; i++)
    if (i < num_rows) {
      if (kRows > 1) place = RowPlace::of(a, item.rows, row + i * Traits::kSlices);
      write_row<Traits>(a, place, x[i], item.value_scale);
    }
  __syncwarp();  // cleared before any lane publishes here again
}

}  // namespace paged_attn::sm90
