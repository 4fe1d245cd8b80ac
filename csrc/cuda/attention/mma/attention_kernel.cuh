// Paged attention with mma.sync: fp16 or bf16 query, cache of the same type or quantised.  See config.cuh for the shape
// of a CTA's work, schedule.cuh for its choice, rows.cuh for the mathematics.
#pragma once

#include "../empty_rows.cuh"
#include "epilogue.cuh"
#include "rows.cuh"

namespace paged_attn::mma {

// Waits until at most `pending` of this thread's groups of copies are in flight.
__device__ __forceinline__ void wait_copies(int pending) {
  if (pending <= 0)
    ptx::cp_async_wait<0>();
  else if (pending == 1)
    ptx::cp_async_wait<1>();
  else
    ptx::cp_async_wait<2>();
}

// Ends a piece whose warps hold different rows.
template <class C>
__device__ void store_rows(const KernelArgs& args, const Piece& piece, const ScoreRule& rule, Rows<C>& rows,
                           float value_scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  rows.reduce_sum();
  Writer<typename C::T> writer(args.p, {C::kRows, C::kKeys}, args.partials, piece);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp * C::kWarpRows + m * 16 + h * 8 + lane / 4;
      if (row >= piece.num_rows) continue;
      writer.begin_row(row, rows.maximum[m][h] * rule.log2_rate, rows.sum[m][h], lane % 4 == 0);
#pragma unroll
      for (int n = 0; n < Rows<C>::kDimTiles; ++n)
        writer.store_pair(n * 8 + lane % 4 * 2, rows.out[m][n][h * 2] * value_scale,
                          rows.out[m][n][h * 2 + 1] * value_scale);
    }
}

// Ends a piece whose warps hold the same rows over different keys: they meet in `exchange`, float [kWarps][kRows]
// [kHeadDim] with the columns of a row swizzled.
template <class C>
__device__ void merge_warps_and_store(const KernelArgs& args, const Piece& piece, const ScoreRule& rule, Rows<C>& rows,
                                      float value_scale, float2* states, float* exchange) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  rows.reduce_sum();
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (lane % 4 == 0)
      states[warp * C::kRows + h * 8 + lane / 4] = make_float2(rows.maximum[0][h] * rule.log2_rate, rows.sum[0][h]);
  __syncthreads();
  Writer<typename C::T> writer(args.p, {C::kRows, C::kKeys}, args.partials, piece);
  auto maximum_of = [&](int row) {
    float maximum = states[row].x;
#pragma unroll
    for (int w = 1; w < C::kWarps; ++w) maximum = fmaxf(maximum, states[w * C::kRows + row].x);
    return maximum;
  };
  auto place = [](int w, int row, int d) { return (w * C::kRows + row) * C::kHeadDim + (d ^ (row % 8 * 8)); };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = h * 8 + lane / 4;
    if (row >= piece.num_rows) continue;
    const float reference = exp2_reference(maximum_of(row));
    const float weight = ptx::exp2(rows.maximum[0][h] * rule.log2_rate - reference) * value_scale;
#pragma unroll
    for (int n = 0; n < Rows<C>::kDimTiles; ++n)
      *reinterpret_cast<float2*>(exchange + place(warp, row, n * 8 + lane % 4 * 2)) =
          make_float2(rows.out[0][n][h * 2] * weight, rows.out[0][n][h * 2 + 1] * weight);
  }
  __syncthreads();
  constexpr int kRowThreads = C::kThreads / C::kRows;
  const int row = threadIdx.x / kRowThreads, part = threadIdx.x % kRowThreads;
  if (row >= piece.num_rows) return;
  const float maximum = maximum_of(row), reference = exp2_reference(maximum);
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < C::kWarps; ++w) {
    const float2 state = states[w * C::kRows + row];
    sum += state.y * ptx::exp2(state.x - reference);
  }
  writer.begin_row(row, maximum, sum, part == 0);
#pragma unroll 4
  for (int d = part * 2; d < args.p.head_dim; d += kRowThreads * 2) {
    float2 o = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      const float2 x = *reinterpret_cast<const float2*>(exchange + place(w, row, d));
      o.x += x.x, o.y += x.y;
    }
    writer.store_pair(d, o.x, o.y);
  }
}

// What the threads of a CTA share, in shared memory to spare their registers.  Thread 0 writes it.
template <class C>
struct CtaState {
  Walk walk;
  Piece pieces[2];  // the present one and the next, taking turns
  ScoreRule rules[2];
  bool more[2];  // there is a piece

  __device__ void advance(const AttentionParams& p, int which) {
    more[which] = walk.next(p, pieces[which]);
    if (more[which]) rules[which] = score_rule<C>(p, pieces[which].head);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2) attention_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  static_assert(sizeof(CtaState<C>) <= C::kStates - C::kShared);
  auto& state = *reinterpret_cast<CtaState<C>*>(smem + C::kShared);
  const AttentionParams& p = args.p;
  const int thread = threadIdx.x, warp = thread / 32;
  const int ahead = args.stages - 1;  // tiles in flight
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  Loader<C> loader(args, smem);

  // Begins to load a piece.  Of the stages, all but the last may be written from here on.
  auto start = [&](const Piece& piece) {
    for (int i = thread; i < args.stages * C::kKeys; i += C::kThreads) {
      const int stage = i / C::kKeys, row = i % C::kKeys, tile = piece.tile_begin + stage;
      const int block = loader.find_block(piece, tile, row);
      loader.publish_address(piece, stage, tile, row, block);
      if constexpr (C::kQuantized) loader.load_scales(piece, stage, tile, row, block);
    }
    loader.load_query(piece);
    __syncthreads();
    for (int stage = 0; stage < ahead; ++stage) {
      if (piece.tile_begin + stage < piece.tile_end) loader.load_tile(piece, stage, piece.tile_begin + stage);
      ptx::cp_async_commit();
    }
  };

  if (warp == 0) {
    const Walk walk(p, {C::kRows, C::kKeys}, args.plan, args.min_share, args.partials.unit_tiles);
    if (thread == 0) {
      state.walk = walk;
      state.advance(p, 0);
      args.partials.items[blockIdx.x] = {0, 0, 0};
    }
  }
  __syncthreads();
  if (state.more[0]) start(state.pieces[0]);
  for (int which = 0; state.more[which]; which ^= 1) {
    const Piece& piece = state.pieces[which];
    Rows<C> rows;
    rows.clear();
    const ScoreRule& rule = state.rules[which];
    int stage = 0, block = -1;
#pragma unroll 1
    for (int tile = piece.tile_begin; tile < piece.tile_end; ++tile) {
      wait_copies(ahead - 1);
      __syncthreads();  // the tile is there for all, and the stage of the tile before is free
      const int next_stage = stage == 0 ? ahead : stage - 1;
      const bool load = tile + ahead < piece.tile_end;
      // Decode, short of bytes in flight, is faster with the loads between the products, prefill with all of them
      // first.
      const bool load_between = C::kDecode && loader.aligned();
      if (load && !load_between) loader.load_tile(piece, next_stage, tile + ahead);
      if (C::kQuantized && load && tile > piece.tile_begin && thread < C::kKeys)
        loader.load_scales(piece, next_stage, tile + ahead, thread, block);
      if (thread < C::kKeys) block = loader.find_block(piece, tile + args.stages, thread);
      if constexpr (C::kQuantized) loader.convert_tile(stage);
      const int row0 = C::kDecode ? 0 : warp * C::kWarpRows, key0 = C::kDecode ? warp * C::kWarpKeys : 0;
      auto load_next = [&](int step) {
        if (load && load_between && step < Loader<C>::kLoadSteps) loader.load_step(next_stage, step);
      };
      if (row0 < piece.num_rows)
        rows.add_tile(p, piece, rule, ptx::smem_address(smem + C::kQuery) + row0 * C::kRowBytes,
                      loader.tile_address(stage) + key0 * C::kRowBytes, row0, tile * C::kKeys + key0,
                      loader.query_scales() + row0, loader.scales(stage) + key0, load_next);
      ptx::cp_async_commit();
      if (thread < C::kKeys) loader.publish_address(piece, stage, tile + args.stages, thread, block);
      stage = stage == ahead ? 0 : stage + 1;
    }
    if (thread == 0) {
      if (args.partials.unit_tiles == 0 && piece.first && !piece.last)
        args.partials.items[blockIdx.x] = state.walk.cut_item(piece);
      state.advance(p, which ^ 1);
    }
    __syncthreads();
    if (state.more[which ^ 1]) start(state.pieces[which ^ 1]);  // its loads run while this piece is finished
    float value_scale = 1.f;
    if constexpr (C::kQuantized)
      value_scale = per_token(p.v_scale) ? rows.value_unit : head_scale(p.v_scale, piece.head);
    if constexpr (C::kDecode) {
      unsigned char* exchange = C::kQuantized ? smem + C::kConverted : loader.stage_data(ahead);
      merge_warps_and_store<C>(args, piece, rule, rows, value_scale, reinterpret_cast<float2*>(smem + C::kStates),
                               reinterpret_cast<float*>(exchange));
    } else {
      store_rows<C>(args, piece, rule, rows, value_scale);
    }
  }
  if (args.range.owns_empty) write_empty_rows<typename C::T>(p);
}

}  // namespace paged_attn::mma
