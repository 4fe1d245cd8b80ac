// The end of a piece: where its rows go.
#pragma once

#include "../softmax.cuh"
#include "config.cuh"

namespace paged_attn::mma {

// Four neighbouring elements of an output row, times `scale`; a scale of 0 means that no key was seen.
__device__ __forceinline__ void store_scaled(float* out, float4 x, float scale) {
  const bool none = scale == 0.f;
  out[0] = none ? 0.f : x.x * scale, out[1] = none ? 0.f : x.y * scale;
  out[2] = none ? 0.f : x.z * scale, out[3] = none ? 0.f : x.w * scale;
}
template <class T>
__device__ __forceinline__ uint2 scaled(float4 x, float scale) {
  return scale == 0.f ? make_uint2(0, 0)
                      : make_uint2(ptx::pack<T>(x.x * scale, x.y * scale), ptx::pack<T>(x.z * scale, x.w * scale));
}
template <class T>
__device__ __forceinline__ void store_scaled(T* out, float4 x, float scale) {
  const uint2 four = scaled<T>(x, scale);
  if (reinterpret_cast<uintptr_t>(out) % 8 == 0) {
    *reinterpret_cast<uint2*>(out) = four;
  } else {
    auto* halves = reinterpret_cast<uint16_t*>(out);
    halves[0] = static_cast<uint16_t>(four.x), halves[1] = static_cast<uint16_t>(four.x >> 16);
    halves[2] = static_cast<uint16_t>(four.y), halves[3] = static_cast<uint16_t>(four.y >> 16);
  }
}

// A row of the output: where it begins, and what its unnormalised elements are multiplied by; 0: no key was seen.
template <class T>
struct OutputRow {
  T* out;
  float scale;
};
// Of a token of a piece that is the whole item.  `maximum` is in log2 units; one of the threads that share the row
// stores the LSE.
template <class T>
__device__ __forceinline__ OutputRow<T> output_row(const AttentionParams& p, const PlanEntry& e, int token, int head,
                                                   float maximum, float sum, bool stores_lse) {
  const RowEnd end = finish_row(maximum, sum, p.sinks ? p.sinks + head : nullptr);
  T* out = static_cast<T*>(p.out) + (e.q_begin + token) * p.out_strides.token + head * p.out_strides.head;
  if (p.lse && stores_lse) p.lse[static_cast<int64_t>(e.q_begin + token) * p.num_heads + head] = end.lse;
  return {out, end.output_scale};
}

// Stores rows of a piece: into the output where the piece is the whole item, else into the partials.
template <class T>
class Writer {
 public:
  __device__ Writer(const KernelArgs& args, TileShape shape, const Piece& piece)
      : p_(args.p), shape_(shape), partials_(args.partials), piece_(piece), group_(args.heads.group) {}

  // Row `row` of the tile, to be followed by its output in fours.  `maximum` is in log2 units; one of the threads that
  // share the row stores the state.
  __device__ void begin_row(int row, float maximum, float sum, bool stores_state) {
    const PlanEntry& e = piece_.entry;
    const int packed = e.first_row + row, token = group_.quotient(packed);
    const int head = piece_.head * group_.value + packed - token * group_.value;
    if (piece_.whole()) {
      row_ = output_row<T>(p_, e, token, head, maximum, sum, stores_state);
    } else {
      const int64_t r = partials_.units.tiles > 0
                            ? partials_.unit_row(p_, e, token, head, partials_.units.index(piece_.tile_begin))
                            : partials_.balanced_row(shape_, blockIdx.x, piece_.first, row);
      partial_ = partials_.out + r * partials_.row_stride;
      if (stores_state) partials_.state[r] = make_float2(maximum, sum);
    }
  }
  // Four columns, from d on.
  __device__ void store(int d, float4 x) const {
    if (d >= p_.head_dim) return;
    if (piece_.whole()) {
      store_scaled(row_.out + d, x, row_.scale);
    } else {
      *reinterpret_cast<float4*>(partial_ + d) = x;
    }
  }

 private:
  const AttentionParams& p_;
  TileShape shape_;
  const Partials& partials_;
  const Piece& piece_;
  const Divisor& group_;
  OutputRow<T> row_ = {};
  float* partial_ = nullptr;
};

}  // namespace paged_attn::mma
