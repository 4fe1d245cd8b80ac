// The end of a piece: where its rows go.
#pragma once

#include "../softmax.cuh"
#include "config.cuh"

namespace paged_attn::mma {

// Two neighbouring elements of an output row, times `scale`; a scale of 0 means that no key was seen.
__device__ __forceinline__ void store_scaled(float* out, float x, float y, float scale) {
  out[0] = scale == 0.f ? 0.f : x * scale;
  out[1] = scale == 0.f ? 0.f : y * scale;
}
template <class T>
__device__ __forceinline__ void store_scaled(T* out, float x, float y, float scale) {
  const uint32_t two = scale == 0.f ? 0u : ptx::pack<T>(x * scale, y * scale);
  if (reinterpret_cast<uintptr_t>(out) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(out) = two;
  } else {
    reinterpret_cast<uint16_t*>(out)[0] = static_cast<uint16_t>(two);
    reinterpret_cast<uint16_t*>(out)[1] = static_cast<uint16_t>(two >> 16);
  }
}

// Stores rows of a piece: into the output where the piece is the whole item, else into the partials.
template <class T>
class Writer {
 public:
  __device__ Writer(const KernelArgs& args, TileShape shape, const Piece& piece)
      : p_(args.p), shape_(shape), partials_(args.partials), piece_(piece), group_(args.group) {}

  // Row `row` of the tile, to be followed by its output in pairs.  `maximum` is in log2 units; one of the threads that
  // share the row stores the state.
  __device__ void begin_row(int row, float maximum, float sum, bool stores_state) {
    const PlanEntry& e = piece_.entry;
    const int packed = e.first_row + row, token = group_.quotient(packed);
    const int head = piece_.head * group_.value + packed - token * group_.value;
    if (piece_.whole()) {
      const RowEnd end = finish_row(maximum, sum, p_.sinks ? p_.sinks + head : nullptr);
      scale_ = end.output_scale;
      out_ = static_cast<T*>(p_.out) + (e.q_begin + token) * p_.out_strides.token + head * p_.out_strides.head;
      if (p_.lse && stores_state) p_.lse[static_cast<int64_t>(e.q_begin + token) * p_.num_heads + head] = end.lse;
    } else {
      const int64_t r = partials_.unit_tiles > 0
                            ? partials_.unit_row(p_, e, token, head, piece_.tile_begin / partials_.unit_tiles)
                            : partials_.balanced_row(shape_, blockIdx.x, piece_.first, row);
      partial_ = partials_.out + r * partials_.row_stride;
      if (stores_state) partials_.state[r] = make_float2(maximum, sum);
    }
  }
  __device__ void store_pair(int d, float x, float y) const {
    if (d >= p_.head_dim) return;
    if (piece_.whole()) {
      store_scaled(out_ + d, x, y, scale_);
    } else {
      *reinterpret_cast<float2*>(partial_ + d) = make_float2(x, y);
    }
  }

 private:
  const AttentionParams& p_;
  TileShape shape_;
  const Partials& partials_;
  const Piece& piece_;
  const Divisor& group_;
  T* out_ = nullptr;
  float* partial_ = nullptr;
  float scale_ = 0.f;
};

}  // namespace paged_attn::mma
