// A consumer warp: drains the ring tile by tile and finishes rows at the end of a piece.
#pragma once

#include "../empty_rows.cuh"
#include "decode_producer.h"
#include "decode_tile.h"

namespace paged_attn::sm90 {

// Warps are numbered (head slot, row group, slice of tokens).  Those that differ in the slice alone are a team: they
// hold the same rows over different tokens, and meet at the end of a piece.
template <class Traits>
struct Consumer {
  static constexpr int kSlices = Traits::kSlices, kHeadDim = Traits::kHeadDim, kWarpRows = Traits::kWarpRows;
  static constexpr int kPitch = Traits::kSumPitch, kEndRows = Traits::kEndRows;
  static constexpr int kWarpTokens = 16 * Traits::kTokenTiles;
  using Row = Partial<kHeadDim>;

  // Of a warp, in shared memory because registers are scarce.  All lanes write the same.
  struct Memo {
    Walk<Traits> walk;
    Item item;  // where the walk is
    Item held;  // the item that an earlier CTA began and we end, if num_rows > 0
  };
  static_assert(sizeof(Memo) <= Traits::kMemoBytes);

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
  __device__ __forceinline__ Memo& memo() const {
    return reinterpret_cast<Memo*>(shared + Traits::kMemoOffset)[warp()];
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
    int first = threadIdx.x;
    asm volatile("" : "+r"(first));  // what follows from it is computed anew: registers are scarce
    for (int i = first; i < Traits::kHeads * num_rows * kPieces; i += Traits::kWarps * 32) {
      const int row = i / kPieces, head = Traits::kHeads == 1 ? 0 : row / num_rows;
      const uint32_t address =
          buffer + (row + head * (Traits::kRows - num_rows)) * Traits::kQueryPitch + i % kPieces * 8;
      const uint2 x = ptx::load_shared_v2(address);
      ptx::store_shared_v2(address, make_uint2(to_half2(x.x, true), to_half2(x.y, true)));
    }
    ptx::fence_proxy_async();  // a bulk copy writes here next
    ptx::named_barrier_sync(1 + Traits::kHeads * Traits::kRowGroups, Traits::kWarps * 32);
  }

  // The call ends with this, so not by way of code that has yet to be fetched.
  __device__ __forceinline__ static void exit_thread() { asm volatile("exit;"); }

  // The end of a piece.  Its rows are written if it is all of the item, else published.  The CTA of an item's last
  // piece takes the published rows and writes them: at once if it has computed all pieces, else at the end of its
  // share, when all of them are about ready.
  __device__ __forceinline__ void finish_piece(const SoftmaxState<Traits>& x, int piece, bool last_of_share) const {
    Item item = memo().item;
    const bool whole = item.pieces.count == 1, ends = !whole && piece == item.pieces.count - 1;
    bool due = ends && (last_of_share || (a.p.batch_invariant && item.pieces.in_one_cta()));
    const int slot = item.pieces.slot(piece);
    share_state(x);
#pragma unroll 1
    for (int i = slice(); i < kWarpRows && first_row() + i < item.num_rows; i += kSlices) {
      Row y;
      y.clear();
      add_states(y, i);
      if (whole)
        write_row<Traits>(a, RowPlace::of(a, item.rows, first_row() + i), y, item.value_scale);
      else
        publish(SlotRow<Traits>(a, slot, head() * Traits::kRows + first_row() + i), y);
    }
    if (ends && !due) memo().held = item;
    if (!due && !last_of_share) return;
    __syncwarp();
    bool held = last_of_share && memo().held.num_rows > 0;
    if (!due && !held) exit_thread();
#pragma unroll 1
    for (;; due = false) {
      if (!due) {
        item = memo().held;
        held = false;
      }
#pragma unroll 1
      for (int i = slice(); i < kWarpRows; i += kSlices * kEndRows) {
        const int row = first_row() + i, num_rows = (item.num_rows - row + kSlices - 1) / kSlices;
        if (num_rows <= 0) break;
        take_published<Traits>(a, item, head() * Traits::kRows, row, num_rows);
      }
      if (held) continue;
      if (last_of_share) exit_thread();
      return;
    }
  }

  // `share`: in shared memory, written by a producer.
  __device__ __forceinline__ void run(const Ring& ring, const Walk<Traits>& share) const {
    using Element = std::conditional_t<Traits::kQuantized, __half, typename Traits::Cache>;  // zero is zero in either
    const AttentionParams& p = a.p;
    LaneMap<Traits> lanes(a, head(), slice() * kWarpTokens);
    Cursor stage, query;
    ptx::pdl_wait();
    if (threadIdx.x == 0) ptx::mbarrier_arrive(ring.ended);
    // The prefill kernel beside this one does not wait for what went before: that has ended now.
    if (a.range.side_by_side) ptx::pdl_launch_dependents();
    ptx::mbarrier_wait(ring.share, 0);
    memo().walk = share;
    memo().held.num_rows = 0;
    if (a.range.owns_empty) write_empty_rows<Element>(p, Traits::kWarps * 32);  // the first stages are on their way
    for (;;) {
      __syncwarp();
      const Walk<Traits>& w = memo().walk;
      if (w.done()) return;
      const Visibility see(a, w.s);
      float score_scale = p.scale * kLog2e;
      Item item;
      item.pieces = Pieces::of(a, w);
      item.rows = {w.s.query_begin, w.head_group * Traits::kHeads + head(), a.group, a.group_inverse};
      item.num_rows = min(w.s.query_len * a.group, a.max_rows);
      item.value_scale = 1.f;
      if (Traits::kQuantized && !Traits::kTokenScales) {
        if (p.k_scale.data) score_scale *= __ldg(p.k_scale.data + item.rows.kv_head * p.k_scale.strides.head);
        if (p.v_scale.data) item.value_scale = __ldg(p.v_scale.data + item.rows.kv_head * p.v_scale.strides.head);
      }
      memo().item = item;
      const uint32_t query_buffer = ring.stages + Traits::kQueryOffset + query.index * Traits::kQueryBytes;
      const uint32_t query_free = ring.query + query.index * 8;
      query.step(2);
      lanes.set_rows(head(), first_row(), item.num_rows);
      const int limit = w.limit(a), origin = w.s.first_tile * Traits::kTileTokens + slice() * kWarpTokens;
      int tile = w.tile;
      ptx::mbarrier_wait(ring.full + stage.index * 8, stage.parity);  // the query rows are there
      if (Traits::kQuantized && !Traits::kQueryInRegisters) convert_query(query_buffer, item.num_rows);
      do {
        int end = limit;
        if (p.batch_invariant) {
          const int part = part_tiles<Traits>(w.s.num_tiles);
          end = min(limit, (tile / part + 1) * part);
        }
        const auto release_query = [&] {
          if (Traits::kQueryArrivals == 1) __syncwarp();
          if (end == limit && threadIdx.x % 32 < Traits::kQueryArrivals) ptx::mbarrier_arrive(query_free);
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
        do {
          ptx::mbarrier_wait(ring.full + stage.index * 8, stage.parity);
          const int first_token = origin + tile * Traits::kTileTokens;
          if (!Traits::kLoadsOnly && first_token < see.len && first_token + kWarpTokens > see.first_key)
            attend<Traits>(
                a, x, lanes, ring.stages + stage.index * Traits::kStageBytes,
                ring.scales<Traits>(stage.index, 0) + (head() * Traits::kTileTokens + slice() * kWarpTokens) * 4,
                query_buffer, q, score_scale, memo().item.rows, first_row(), first_token, see);
          __syncwarp();
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring.empty + stage.index * 8);
          stage.step(Traits::kStages);
        } while (++tile < end);
        if (!Traits::kQueryInRegisters) release_query();
        if (Traits::kLoadsOnly) continue;
        int piece = CtaPlace::of(a).number(a) - memo().item.pieces.base;
        if (p.batch_invariant) piece = (end - 1) / part_tiles<Traits>(w.s.num_tiles);
        finish_piece(x, piece, end == limit && w.in_last_item());
      } while (tile < limit);
      if (w.in_last_item()) return;  // at once: the call ends with this
      Walk<Traits> next = w;
      next.next_item(a);
      __syncwarp();
      memo().walk = next;
    }
  }
};

}  // namespace paged_attn::sm90
