// The CPU side of the ops: what ops.h checked and filled in goes straight to the kernels.
#include "../ops.h"
#include "kernels.h"

namespace paged_attn {
namespace {

struct CpuBackend {
  static void paged_attention(const AttentionParams& p, const Tensor&) {
    if (p.backend != AttentionBackend::kAuto) fail("backend: expected 'auto' for tensors on the CPU");
    cpu::paged_attention(p);
  }
  static void write_kv(const KvWriteParams& p, const Tensor&) { cpu::write_kv(p); }
  static void rope_write_kv(const RopeWriteParams& p, const Tensor&) { cpu::rope_write_kv(p); }
  static void gather_kv(const GatherParams& p, const Tensor&) { cpu::gather_kv(p); }
  static void merge_attn_states(const MergeParams& p, const Tensor&) { cpu::merge_attn_states(p); }
  static void copy_blocks(const std::vector<BlockArray>& caches, const Tensor& pairs, const Tensor&) {
    cpu::copy_blocks(caches, static_cast<const int64_t*>(pairs.data_ptr()), pairs.size(0));
  }
  static void swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const Tensor& pairs,
                          const Tensor&, const Tensor&, Overlap overlap, bool) {
    cpu::swap_blocks(src, dst, static_cast<const int64_t*>(pairs.data_ptr()), pairs.size(0), overlap);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { register_ops<CpuBackend>(m); }

}  // namespace paged_attn
