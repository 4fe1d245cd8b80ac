// The producer warps, one for K and one for V: block table -> page coordinates -> TMA boxes into the ring of stages.
//
// Each walks the whole share of its CTA over the ends of items, so the ring never drains there, and looks up page ids
// one batch of 32 boxes ahead: a lane a box.  Stage i holds K then V of a tile, each as
// boxes in the order of RowOrder, swizzled.  Only boxes that hold a visible key are asked for, and the barrier expects
// the bytes of those alone.
#pragma once

#include "decode_merge.h"

namespace paged_attn::sm90 {

struct Ring {
  uint32_t stages;  // shared-memory addresses
  uint32_t full;    // [kStages] barriers: one arrival a producer (with kTokenScales: and its lanes), then bytes
  uint32_t empty;   // [kStages]: one arrival a consumer warp
  uint32_t query;   // [2]: a query buffer is free again; kQueryArrivals a consumer warp
  uint32_t share;   // a producer has found the share
  uint32_t ended;   // a consumer has seen the kernel ahead end

  template <class Traits>
  __device__ __forceinline__ static Ring at(uint32_t base) {
    const uint32_t full = base + Traits::kBarrierOffset;
    const uint32_t empty = full + Traits::kStages * 8, query = empty + Traits::kStages * 8;
    return {base, full, empty, query, query + 16, query + 24};
  }
  // Of K (`tensor` 0) or V (1): [kHeads, kTileTokens] floats.
  template <class Traits>
  __device__ __forceinline__ uint32_t scales(int stage, int tensor) const {
    return stages + Traits::kScaleOffset + (stage * 2 + tensor) * Traits::kScaleBytes;
  }
  template <class Traits>
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Traits::kStages; i++) {
      ptx::mbarrier_init(full + i * 8, Traits::kProducers * (Traits::kTokenScales ? 33 : 1));
      ptx::mbarrier_init(empty + i * 8, Traits::kWarps);
    }
    ptx::mbarrier_init(query, Traits::kWarps * Traits::kQueryArrivals);
    ptx::mbarrier_init(query + 8, Traits::kWarps * Traits::kQueryArrivals);
    ptx::mbarrier_init(share, 1);
    ptx::mbarrier_init(ended, 1);
    ptx::mbarrier_init_fence();
  }
};

// Position in a circle of `n` buffers and the parity of the round.
struct Cursor {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void step(int n) {
    if (++index == n) index = 0, parity ^= 1;
  }
};

// One lane's box of a stage.
struct Box {
  int page, row, head_group;
  int query_begin, query_rows;
  bool valid;    // the stage belongs to our share
  bool present;  // the box holds a visible key
  bool first;    // the stage opens a piece: the query rows ride in it
};

template <class Traits>
__device__ __forceinline__ Box look_up(const DecodeArgs& a, const Walk<Traits>& w, int box, bool starts) {
  Box b;
  const int token = w.first_token() + (box << a.box_shift);
  b.valid = !w.done();
  b.present = b.valid && token < w.s.len && token + (1 << a.box_shift) > w.s.first_key;
  b.first = starts || w.tile == 0;
  b.head_group = w.head_group;
  b.query_begin = w.s.query_begin;
  b.query_rows = min(w.s.query_len * a.group, a.max_rows);
  b.row = token & (a.p.block_size - 1);
  b.page = b.present ? __ldg(a.p.block_table + w.seq * a.p.block_table_stride + (token >> a.block_shift)) : 0;
  return b;
}

// Query rows of all heads of an item into a buffer; completion counts on `barrier`.
template <class Traits>
__device__ __forceinline__ void load_query(const DecodeArgs& a, uint32_t buffer, int query_begin, int query_rows,
                                           int head_group, uint32_t barrier) {
  const AttentionParams& p = a.p;
  for (int i = threadIdx.x % 32; i < Traits::kHeads * query_rows; i += 32) {
    const int slot = Traits::kHeads == 1 ? 0 : i / query_rows, row = i - slot * query_rows;
    const RowMap rows = {query_begin, head_group * Traits::kHeads + slot, a.group, a.group_inverse};
    const uint16_t* src = static_cast<const uint16_t*>(p.query) +
                          (query_begin + rows.token(row)) * p.query_strides.token +
                          (rows.kv_head * a.group + rows.head(row)) * p.query_strides.head;
    ptx::bulk_load(buffer + (slot * Traits::kRows + row) * Traits::kQueryPitch, src, Traits::kHeadDim * 2, barrier);
  }
}

// Scales of K or V for the tokens of a stage, into [head][token], kWidth adjacent tokens a copy; completion counts on
// `barrier`.  `box`: what each lane has looked up, `source`: the lane with the first box of the stage, `present`: the
// lanes whose boxes are read and lie in the cache; scales elsewhere become 0.
template <class Traits, int kWidth>
__device__ __forceinline__ void load_scales(const ScaleView& scale, int box_shift, uint32_t dst, const Box& box,
                                            int source, unsigned present, int head_group, uint32_t barrier) {
  constexpr int kHeadCopies = Traits::kTileTokens / kWidth, kCopies = Traits::kHeads * kHeadCopies;
#pragma unroll
  for (int i = 0; i < kCopies; i += 32) {
    const int copy = i + threadIdx.x % 32, token = copy % kHeadCopies * kWidth, owner = source + (token >> box_shift);
    const int page = __shfl_sync(~0u, box.page, owner);
    const int slot = __shfl_sync(~0u, box.row, owner) + (token & ((1 << box_shift) - 1));
    const float* src = scale.data + page * scale.strides.block + slot * scale.strides.slot +
                       (head_group * Traits::kHeads + copy / kHeadCopies) * scale.strides.head;
    const int bytes = present >> owner & 1 ? kWidth * 4 : 0;
    if (kCopies % 32 != 0 && copy >= kCopies) continue;
    if constexpr (kWidth == 4)
      ptx::cp_async_16(dst + copy * 16, src, bytes);
    else
      ptx::cp_async_4(dst + copy * 4, src, bytes);
  }
  ptx::cp_async_mbarrier_arrive(barrier);
}

// `tensor` 0: K and the query rows, 1: V.  `share`: in shared memory, written here.  `early`: lengths and table may be
// read before the kernel ahead has ended.
template <class Traits>
__device__ __forceinline__ void produce(const DecodeArgs& a, const CUtensorMap* map, int tensor, const Ring& ring,
                                        Walk<Traits>& share, bool early) {
  const int lane = threadIdx.x % 32;
  const int boxes_shift = 31 - __clz(Traits::kTileTokens) - a.box_shift;  // of a stage
  const int boxes = 1 << boxes_shift, stages_per_batch = 32 >> boxes_shift;
  const int box_bytes = (Traits::kHeads * Traits::kRowBytes) << a.box_shift;
  const int my_stage = lane >> boxes_shift, my_box = lane & (boxes - 1);
  const auto place = [](const Box& b) {  // coordinates 1 to 3 of cache_map
    if (Traits::kRowOrder == RowOrder::kTokenLines) return make_int3(0, b.row, b.head_group);
    const int row = Traits::kRowOrder == RowOrder::kBlockLines ? b.row * Traits::kRowBytes / 128 : b.row;
    return make_int3(row, 0, b.head_group * Traits::kHeads);
  };
  const uint64_t policy = ptx::l2_evict_first();  // every byte is read once
  if (!early) ptx::pdl_wait();
  Walk<Traits> w = make_walk<Traits>(a);
  if (tensor == 0 && lane == 0) {
    share = w;
    ptx::mbarrier_arrive(ring.share);
  }
  w.advance(a, my_stage);
  Box now = look_up(a, w, my_box, my_stage == 0);
  Box next;
  const int ring_full = min(Traits::kStages, stages_per_batch) - 1;  // when there is time to look ahead
  // L2 is coherent: what the kernel ahead still writes to these blocks is seen by the loads below.  Prefetches queue
  // ahead of the loads: half a ring of them where the share is short, and none once the kernel ahead has ended.
  const int prefetched = w.chunk > 8 * Traits::kStages ? Traits::kStages : Traits::kStages / 2;
  if (early && now.present && my_stage < prefetched && !ptx::mbarrier_test(ring.ended, 0)) {
    const int3 at = place(now);
    ptx::tensor_prefetch_5d(map, 0, at.x, at.y, at.z, now.page);
  }
  Cursor stage, query;
  for (bool more = true; more;) {
#pragma unroll 1
    for (int i = 0; i < stages_per_batch; i++) {
      const int source = i << boxes_shift;
      more = __shfl_sync(~0u, static_cast<int>(now.valid), source);
      if (!more) break;
      const unsigned present = __ballot_sync(~0u, now.present && my_stage == i);
      const bool with_query = __shfl_sync(~0u, static_cast<int>(now.first), source) && tensor == 0;
      const int query_begin = __shfl_sync(~0u, now.query_begin, source);
      const int query_rows = __shfl_sync(~0u, now.query_rows, source);
      const int head_group = __shfl_sync(~0u, now.head_group, source);
      const uint32_t full = ring.full + stage.index * 8;
      if (with_query) ptx::mbarrier_wait(ring.query + query.index * 8, query.parity ^ 1);
      ptx::mbarrier_wait(ring.empty + stage.index * 8, stage.parity ^ 1);
      const int query_bytes = with_query ? Traits::kHeads * query_rows * Traits::kHeadDim * 2 : 0;
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, __popc(present) * box_bytes + query_bytes);
      __syncwarp();
      if (early) {
        ptx::pdl_wait();  // as late as can be: before the first load
        early = false;
      }
      if (my_stage == i && now.present) {
        const uint32_t dst = ring.stages + stage.index * Traits::kStageBytes + tensor * Traits::kTensorBytes;
        const int3 at = place(now);
        ptx::tensor_load_5d(dst + my_box * box_bytes, map, 0, at.x, at.y, at.z, now.page, full, policy);
      }
      if constexpr (Traits::kTokenScales) {
        const ScaleView& scale = tensor ? a.p.v_scale : a.p.k_scale;
        const uint32_t dst = ring.scales<Traits>(stage.index, tensor);
        const unsigned present = __ballot_sync(~0u, now.present && static_cast<unsigned>(now.page) < a.p.num_blocks);
        if (a.adjacent_scales)
          load_scales<Traits, 4>(scale, a.box_shift, dst, now, source, present, head_group, full);
        else
          load_scales<Traits, 1>(scale, a.box_shift, dst, now, source, present, head_group, full);
      }
      if (with_query) {
        load_query<Traits>(a, ring.stages + Traits::kQueryOffset + query.index * Traits::kQueryBytes, query_begin,
                           query_rows, head_group, full);
        query.step(2);
      }
      stage.step(Traits::kStages);
      if (i == ring_full) {
        w.advance(a, stages_per_batch);
        next = look_up(a, w, my_box, false);
      }
    }
    now = next;
  }
  if constexpr (Traits::kTokenScales) ptx::cp_async_wait<0>();
}

}  // namespace paged_attn::sm90
