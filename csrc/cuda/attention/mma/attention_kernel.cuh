// Paged attention for compute capability 8.0 and up.  See config.cuh for the shape of a CTA's work, schedule.cuh for
// its choice, mma_rows.cuh and fma_rows.cuh for the mathematics.
#pragma once

#include "../../warp.cuh"
#include "../empty_rows.cuh"
#include "fma_rows.cuh"
#include "merge_row.cuh"
#include "mma_rows.cuh"
#include "plan.cuh"
#include "tile_ring.cuh"

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

// Prefill counts, addresses and branches in uniform registers.  Not so decode, whose loops are too short for it.
template <class C, class T>
__device__ __forceinline__ T uniform(T x) {
  if constexpr (C::kDecode)
    return x;
  else if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(paged_attn::uniform(reinterpret_cast<unsigned long long>(x)));
  else
    return static_cast<T>(paged_attn::uniform(static_cast<int>(x)));
}
template <class C>
__device__ __forceinline__ PieceView uniform(const PieceView& v) {
  return {uniform<C>(v.keys),       uniform<C>(v.values),   uniform<C>(v.blocks),      uniform<C>(v.last_key),
          uniform<C>(v.tile_begin), uniform<C>(v.tile_end), uniform<C>(v.plain_begin), uniform<C>(v.plain_end),
          uniform<C>(v.num_rows),   uniform<C>(v.modified)};
}

// What the threads of a CTA share, in shared memory to spare their registers.  Thread 0 writes it.
template <class C>
struct CtaState {
  Walk walk;
  Piece pieces[2];  // the present one and the next, taking turns
  ScoreRule rules[2];
  PieceView views[2];
  bool more[2];  // there is a piece
  int turn;      // drawn for the next one
  Parts merged;  // those that this CTA merges now; count 0: none

  __device__ void advance(const KernelArgs& args, int which) {
    const AttentionParams& p = args.p;
    Piece& piece = pieces[which];
    more[which] = walk.next(p, args.heads, {C::kRows, C::kKeys}, turn, piece);
    if (!more[which]) return;
    rules[which] = score_rule<C>(p, piece.head);
    views[which] = {static_cast<const unsigned char*>(p.key_cache) + piece.head * args.key_bytes.head,
                    static_cast<const unsigned char*>(p.value_cache) + piece.head * args.value_bytes.head,
                    p.block_table + piece.entry.seq * p.block_table_stride,
                    max(0, piece.span.key_end - 1),
                    piece.tile_begin,
                    piece.tile_end,
                    (piece.span.full_begin + C::kKeys - 1) / C::kKeys,
                    args.plain_copies ? min(piece.tile_end, piece.span.full_end / C::kKeys) : 0,
                    piece.num_rows,
                    rules[which].modified};
    if (!C::kMergesItself && args.partials.units.tiles == 0 && piece.first && !piece.last)
      args.partials.items[blockIdx.x] = {piece.entry, piece.head, walk.parts(piece).count};
  }
};

// A piece has been written to the partials: the CTA that is the last of its item to get here merges them all.
template <class C>
__device__ void merge_if_last(const KernelArgs& args, CtaState<C>& state, const Piece& piece) {
  const Partials& partials = args.partials;
  __syncthreads();
  if (threadIdx.x == 0) {
    const Parts parts = state.walk.parts(piece);
    int* arrivals = partials.arrivals + parts.first_cta;
    ptx::fence_acq_rel_gpu();  // the whole CTA's part is visible before the arrival is
    const bool last = atomicAdd(arrivals, 1) == parts.count - 2;
    ptx::fence_acq_rel_gpu();
    if (last) *arrivals = -1;
    state.merged = {parts.first_cta, last ? parts.count : 0};
  }
  __syncthreads();
  const Parts parts = state.merged;
  if (parts.count == 0) return;
  constexpr TileShape kShape = {C::kRows, C::kKeys};
  constexpr int kVectors = (C::kHeadDim + 127) / 128, kBatch = kVectors == 1 ? 16 : 4;
  for_each_row(args.heads, kShape, piece.entry, piece.head, threadIdx.x / 32, C::kWarps,
               [&](int r, int token, int head) {
                 auto part = [&](int i) { return partials.balanced_row(kShape, parts.first_cta + i, i == 0, r); };
                 merge_row<typename C::T, kVectors, kBatch>(args.p, partials, parts.count, part,
                                                            piece.entry.q_begin + token, head);
               });
}

// A plan in shared memory.
struct LocalPlan {
  static constexpr int kMaxEntries = 128;
  int num_entries;
  PlanEntry entries[kMaxEntries + 1];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    attention_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  static_assert(sizeof(CtaState<C>) <= C::kStates - C::kShared);
  auto& state = *reinterpret_cast<CtaState<C>*>(smem + C::kShared);
  const AttentionParams& p = args.p;
  const int thread = threadIdx.x, warp = thread / 32;
  const int ahead = C::kRing || C::kMaxStages == 2 ? 1 : args.stages - 1;  // tiles in flight
  ptx::pdl_launch_dependents();
  // With metadata_ready a plan of its own is made, and block numbers are read, before the kernel ahead has ended.
  if (!p.metadata_ready || !C::kMergesItself || args.plan.entries != nullptr) ptx::pdl_wait();
  Loader<C> loader(args, smem);
  TileRing<C> ring(ptx::smem_address(smem + C::kBarriers));
  if (C::kRing && thread == 0) ring.init();
  using Rows = std::conditional_t<C::kTensorCores, MmaRows<C>, FmaRows<C>>;

  typename Loader<C>::Blocks blocks;  // of the next tile to load
  // Begins to load a piece.  Of the stages, all but the last may be written from here on.
  auto start = [&](int which) {
    const Piece& piece = state.pieces[which];
    const PieceView view = state.views[which];
    const int begin = view.tile_begin;
    typename Loader<C>::Blocks found[C::kMaxStages] = {};
#pragma unroll
    for (int stage = 0; stage < C::kMaxStages; ++stage)
      if (stage < ahead && begin + stage < view.tile_end) found[stage] = loader.find_blocks(view, begin + stage);
    ptx::pdl_wait();
    loader.load_query(piece);
#pragma unroll
    for (int stage = 0; stage < C::kMaxStages; ++stage) {
      if (stage >= ahead || C::kRing && begin + stage >= view.tile_end) break;
      if (view.plain(begin + stage))
        loader.load_plain_tile(view, piece, stage, begin + stage, found[stage]);
      else if (begin + stage < view.tile_end)
        loader.load_any_tile(view, piece, stage, begin + stage, found[stage]);
      if constexpr (C::kRing)
        ring.arrive(stage);
      else
        ptx::cp_async_commit();
    }
    if (begin + ahead < view.tile_end) blocks = loader.find_blocks(view, begin + ahead);
  };

  Plan plan = args.plan;
  if constexpr (C::kLocalPlan) {
    if (plan.entries == nullptr) {
      static_assert(sizeof(LocalPlan) <= C::kStages - C::kPlan);
      static_assert(sizeof(PlanScratch<C::kThreads>) <= C::kStageBytes);
      auto& local = *reinterpret_cast<LocalPlan*>(smem + C::kPlan);
      plan = {&local.num_entries, nullptr, local.entries};
      make_plan(p, args.heads, args.range, {C::kRows, C::kKeys}, plan,
                *reinterpret_cast<PlanScratch<C::kThreads>*>(loader.stage_data(0)));
      __syncthreads();
    }
  }
  if (warp == 0) {
    const Walk walk(args.heads, plan, args.deals, args.min_share, args.partials.units);
    if (thread == 0) {
      state.walk = walk;
      if (!C::kMergesItself) args.partials.items[blockIdx.x] = {0, 0, 0};
      state.turn = state.walk.draw();
      state.advance(args, 0);
    }
  }
  __syncthreads();
  if (state.more[0]) start(0);
  ptx::pdl_wait();  // for those that have no piece
  if (thread == 0) state.turn = state.walk.draw();
  for (int which = 0; uniform<C>(state.more[which]); which ^= 1) {
    const Piece& piece = state.pieces[which];
    Rows rows;
    rows.begin(piece);
    const ScoreRule& rule = state.rules[which];
    int stage = 0, tile = uniform<C>(piece.tile_begin);
    PieceView view;
    if (C::kHoldsView) view = uniform<C>(state.views[which]);
    if (C::kRing) __syncthreads();  // the last piece is finished before advance
#pragma unroll 1
    do {
      // Here, where it arrives while the barrier is waited for.
      if (!C::kHoldsView) view = uniform<C>(state.views[which]);
      const int next = tile + ahead;
      int next_stage = stage == 0 ? ahead : stage - 1;
      if constexpr (C::kRing) {
        ring.wait(stage);
        next_stage = stage == C::kMaxStages - 1 ? 0 : stage + 1;
      } else {
        wait_copies(ahead - 1);
        // The tile is there for those who read it, and the stage of the tile before is free.
        if (Loader<C>::kWarpLoadsItsKeys && tile > view.tile_begin)
          __syncwarp();
        else
          __syncthreads();
      }
      if (view.plain(next))
        loader.load_plain_tile(view, piece, next_stage, next, blocks);
      else if (next < view.tile_end)
        loader.load_any_tile(view, piece, next_stage, next, blocks);
      if constexpr (C::kRing) {
        if (next < view.tile_end) ring.arrive(next_stage);
      } else {
        ptx::cp_async_commit();
      }
      if (next + 1 < view.tile_end) blocks = loader.find_blocks(view, next + 1);
      if (tile == view.tile_begin) {
        if (thread == 0) state.advance(args, which ^ 1);
        if (!C::kDecode) __syncwarp();
      }
      if constexpr (C::kConvertsTiles) loader.convert_tile(stage);
      rows.add_tile(args, piece, rule, loader, stage, tile, view);
      if (!C::kDecode) __syncwarp();  // or the assembler takes the lanes to be apart, and nothing to be uniform
      stage = stage == (C::kRing ? C::kMaxStages - 1 : ahead) ? 0 : stage + 1;
    } while (++tile < view.tile_end);
    __syncthreads();
    if (state.more[which ^ 1]) start(which ^ 1);  // its loads run while this piece is finished
    const int turn = thread == 0 ? state.walk.draw() : 0;
    unsigned char* exchange = C::kQuantized && C::kTensorCores ? smem + C::kConverted : loader.stage_data(ahead);
    rows.finish(args, piece, rule, reinterpret_cast<float2*>(smem + C::kStates), reinterpret_cast<float*>(exchange));
    if (thread == 0) state.turn = turn;
    if (C::kMergesItself && args.partials.units.tiles == 0 && !piece.whole()) merge_if_last(args, state, piece);
  }
  if (args.range.owns_empty) write_empty_rows<typename C::T>(p);
}

}  // namespace paged_attn::mma
