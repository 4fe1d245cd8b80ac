// A consumer warp: drains the ring tile by tile and finishes rows at the end of a piece.
#pragma once

#include "../empty_rows.cuh"
#include "decode_producer.h"
#include "decode_tile.h"

namespace paged_attn::sm90 {

// An item as its end sees it.
struct Item {
  Pieces pieces;
  RowMap rows;
  int num_rows;
};

// Warps are numbered (head slot, row group, slice of 16 tokens).  Those that differ in the slice alone are a team: they
// hold the same rows over different tokens, and meet at the end of a piece.
template <class Traits>
struct Consumer {
  static constexpr int kSlices = Traits::kSlices, kHeadDim = Traits::kHeadDim, kWarpRows = Traits::kWarpRows;
  static constexpr int kPitch = Traits::kSumPitch;
  using Row = Partial<kHeadDim>;
  static_assert(sizeof(Item) <= Traits::kHeldBytes);

  const DecodeArgs& a;
  unsigned char* shared;

  // Recomputed where they are used: registers are scarce.
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int team() { return warp() / kSlices; }
  __device__ __forceinline__ static int slice() { return warp() % kSlices; }
  __device__ __forceinline__ static int head() { return team() / Traits::kRowGroups; }  // slot in the stage
  __device__ __forceinline__ static int first_row() { return team() % Traits::kRowGroups * kWarpRows; }
  // The states of the team: [kSlices, kWarpRows, kPitch] and [kSlices, kWarpRows].
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(shared + Traits::kSumOffset) + team() * kSlices * kWarpRows * kPitch;
  }
  __device__ __forceinline__ float2* stats() const {
    return reinterpret_cast<float2*>(shared + Traits::kStatsOffset) + team() * kSlices * kWarpRows;
  }
  // The item that an earlier CTA began and we end, if num_rows > 0.  All lanes write the same.
  __device__ __forceinline__ Item& held() const {
    return reinterpret_cast<Item*>(shared + Traits::kHeldOffset)[warp()];
  }

  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(1 + team(), kSlices * 32); }

  __device__ __forceinline__ void share_state(const SoftmaxState<Traits>& x) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float unit = Traits::kTokenScales ? __fdividef(1.f, x.inverse_unit) : 1.f;
    meet();  // what was here before has been read
#pragma unroll
    for (int j = 0; j < Traits::kRowTiles; j++) {
      const int row = slice() * kWarpRows + j * 8 + 2 * t;
      float* mine = sums() + row * kPitch;
#pragma unroll
      for (int m = 0; m < kHeadDim / 16; m++) {
        const int column = m * 16 + (Traits::kQuantized ? 2 * g : g), next = Traits::kQuantized ? 1 : 8;
        mine[column] = x.o[j][m][0] * unit, mine[column + next] = x.o[j][m][2] * unit;
        mine[kPitch + column] = x.o[j][m][1] * unit, mine[kPitch + column + next] = x.o[j][m][3] * unit;
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = x.sum[j][e];
        if constexpr (Traits::kTokenScales)
          for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (g == 0) stats()[row + e] = make_float2(x.max[j][e], sum);
      }
    }
    meet();
  }

  // Row i of the team, from its states.
  __device__ __forceinline__ void add_states(Row& y, int i) const {
#pragma unroll
    for (int k = 0; k < kSlices; k++) y.max = fmaxf(y.max, stats()[k * kWarpRows + i].x);
#pragma unroll
    for (int k = 0; k < kSlices; k++) {
      const float2 s = stats()[k * kWarpRows + i];
      const float weight = ptx::exp2(s.x - y.max);
      y.sum += s.y * weight;
#pragma unroll
      for (int v = 0; v < Row::kVectors; v++)
        if (y.has(v))
          y.add(
              v,
              *reinterpret_cast<const float4*>(sums() + (k * kWarpRows + i) * kPitch + v * 128 + threadIdx.x % 32 * 4),
              weight);
    }
  }

  // 8-bit caches multiply in fp16: query rows in bf16 that are read again for every tile are converted in place first.
  __device__ __forceinline__ void convert_query(uint32_t buffer, int num_rows) const {
    if (a.p.dtype != DType::kBFloat16) return;
    constexpr int kPieces = kHeadDim / 4;  // of 8 bytes
    for (int i = threadIdx.x; i < num_rows * kPieces; i += Traits::kWarps * 32) {
      const uint32_t address = buffer + i / kPieces * Traits::kQueryPitch + i % kPieces * 8;
      const uint2 x = ptx::load_shared_v2(address);
      ptx::store_shared_v2(address, make_uint2(to_half2(x.x, true), to_half2(x.y, true)));
    }
    ptx::fence_proxy_async();  // a bulk copy writes here next
    ptx::named_barrier_sync(1 + Traits::kHeads * Traits::kRowGroups, Traits::kWarps * 32);
  }

  // The end of a piece, in up to three steps that share one copy of the code: the rows of the piece itself; the item,
  // if we computed and published all of its pieces; and after our last piece the item that an earlier CTA began, held
  // back until now because by now all of its pieces are about ready.  `rehearsal`: one row, of no item; nothing is
  // waited for or written.
  __device__ __forceinline__ void finish_piece(const Item& item, int piece, bool last_of_share, bool rehearsal) const {
    const Pieces& pieces = item.pieces;
    const bool invariant = a.p.batch_invariant;
    const bool ends = pieces.count > 1 && piece == pieces.count - 1;
    const bool ours = invariant && pieces.in_one_cta();
    const bool direct = ends && last_of_share && !invariant;
    const int spare = gridDim.x + blockIdx.x;  // free cuts: the slot of our piece of the item held back
    if (ends && !ours && !direct) held() = item;
    __syncwarp();
#pragma unroll 1
    for (int step = 0; step < 3; step++) {
      if (step == 1 && !(ends && ours)) continue;
      if (step == 2 && !(last_of_share && held().num_rows > 0)) continue;
      Item x = item;
      if (step == 2) x = held();
      const int published = step == 0 && !direct ? 0 : invariant ? x.pieces.count : x.pieces.count - 1;
#pragma unroll 1
      for (int i = slice(); i < kWarpRows; i += kSlices) {
        const int row = first_row() + i, slot_row = head() * Traits::kRows + row;
        if (row >= x.num_rows && !rehearsal) break;
        Row y;
        y.clear();
        if (step == 0) add_states(y, i);
        if (step == 2 && !invariant) take_back(SlotRow<Traits>(a, spare, slot_row), y);
        if (published > 0 || rehearsal) merge_published(SlotRow<Traits>(a, x.pieces.base, slot_row), published, y);
        if (published > 0 || x.pieces.count == 1)
          write_row<Traits>(a, x.rows, row, y, !rehearsal);
        else
          publish(SlotRow<Traits>(a, ends && !invariant ? spare : x.pieces.base + piece, slot_row), y);
        if (rehearsal) return;
      }
    }
  }

  // `w`: the beginning of the share.  With kRehearsal it is found here, after a first pass that is a rehearsal: while
  // the kernel ahead still runs, the end of a piece, the longest stretch of code and all of it in the latency of a
  // short call, is gone through for no item, so that its instructions are in the cache.  `early`: `w` is known before
  // the kernel ahead has ended.
  __device__ __forceinline__ void run(const Ring& ring, Walk<Traits> w, bool early) const {
    using Element = std::conditional_t<Traits::kQuantized, __half, typename Traits::Cache>;  // zero is zero in either
    const AttentionParams& p = a.p;
    LaneMap<Traits> lanes(a, head(), slice() * 16);
    held().num_rows = 0;
    Cursor stage, query;
    Item item = {{0, 1}, {0, 0, a.group, a.group_inverse}, 0};
    const auto begin = [&] {
      if (Traits::kRehearsal || early) ptx::pdl_wait();
      // The prefill kernel beside this one does not wait for what went before: that has ended now.
      if (a.range.side_by_side) ptx::pdl_launch_dependents();
      if constexpr (Traits::kRehearsal) w = make_walk<Traits>(a);
      if (a.range.owns_empty) write_empty_rows<Element>(p, Traits::kWarps * 32);  // the first stages are on their way
    };
    bool rehearsal = Traits::kRehearsal;
    lanes.set_rows(head(), first_row(), 1);
    if (!rehearsal) begin();
    while (rehearsal || !w.done) {
      const Visibility see(a, w.s);
      float key_scale = 1.f;
      const uint32_t query_buffer = ring.stages + Traits::kQueryOffset + query.index * Traits::kQueryBytes;
      const uint32_t query_free = ring.query + query.index * 8;
      int limit = 0;
      if (!rehearsal) {
        item.pieces = Pieces::of(a, w);
        item.rows.query_begin = w.s.query_begin, item.rows.kv_head = w.head_group * Traits::kHeads + head();
        item.num_rows = min(w.s.query_len * a.group, a.max_rows);
        if (Traits::kQuantized && !Traits::kTokenScales && p.k_scale.data)
          key_scale = __ldg(p.k_scale.data + item.rows.kv_head * p.k_scale.strides.head);
        query.step(2);
        lanes.set_rows(head(), first_row(), item.num_rows);
        ptx::mbarrier_wait(ring.full + stage.index * 8, stage.parity);  // the query rows are there
        if (Traits::kQuantized && !Traits::kQueryInRegisters) convert_query(query_buffer, item.num_rows);
        limit = w.limit(a);
      }
      do {
        int end = limit;
        if (p.batch_invariant && !rehearsal) {
          const int part = part_tiles<Traits>(w.s.num_tiles);
          end = min(limit, (w.tile / part + 1) * part);
        }
        const auto release_query = [&] {
          __syncwarp();
          if (end == limit && !rehearsal && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(query_free);
        };
        uint32_t q[Traits::kRowTiles][Traits::kQuerySteps][4];
        if (Traits::kQueryInRegisters) {
#pragma unroll
          for (int j = 0; j < Traits::kRowTiles; j++)
#pragma unroll
            for (int i = 0; i < Traits::kQuerySteps; i++)
              load_query_fragment<Traits>(a, q[j][i], query_buffer + lanes.query[j], i);
          release_query();
        }
        SoftmaxState<Traits> x;
        x.clear();
        for (; w.tile < end; w.tile++) {
          ptx::mbarrier_wait(ring.full + stage.index * 8, stage.parity);
          const int first_token = w.first_token() + slice() * 16;
          if (!Traits::kLoadsOnly && first_token < see.len && first_token + 16 > see.first_key)
            attend<Traits>(a, x, lanes, ring.stages + stage.index * Traits::kStageBytes,
                           ring.scales<Traits>(stage.index, 0) + (head() * Traits::kTileTokens + slice() * 16) * 4,
                           query_buffer, q, key_scale, item.rows, first_row(), first_token, see);
          __syncwarp();
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring.empty + stage.index * 8);
          stage.step(Traits::kStages);
        }
        if (!Traits::kQueryInRegisters) release_query();
        if (Traits::kLoadsOnly) continue;
        share_state(x);
        int piece = blockIdx.x - item.pieces.base;
        if (p.batch_invariant && !rehearsal) piece = (end - 1) / part_tiles<Traits>(w.s.num_tiles);
        finish_piece(item, piece, end == limit && w.in_last_item(), rehearsal);
      } while (w.tile < limit);
      if (rehearsal) {
        rehearsal = false;
        begin();
      } else {
        w.next_item(a);
      }
    }
  }
};

}  // namespace paged_attn::sm90
