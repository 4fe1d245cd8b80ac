// The grid of an instance.
#pragma once

#include <algorithm>
#include <atomic>

#include "../launch.h"
#include "prefill.h"
#include "prefill_kernel.cuh"

namespace paged_attn::sm90 {

// Pairs of CTAs that the current device holds at once.
template <class Traits>
int resident_pairs(const cudaLaunchConfig_t& config) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0, pairs = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kMaxDevices && (pairs = known[device].load())) return pairs;
  check_cuda(
      cudaFuncSetAttribute(prefill_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes),
      "cudaFuncSetAttribute");
  check_cuda(cudaOccupancyMaxActiveClusters(&pairs, prefill_kernel<Traits>, &config), "cudaOccupancyMaxActiveClusters");
  if (pairs < 1) throw std::runtime_error("paged_attention: the device cannot hold a pair of prefill CTAs");
  if (device < kMaxDevices) known[device].store(pairs);
  return pairs;
}

template <class Traits>
void launch_prefill_kernel(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kClusterSize;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = kClusterSize;
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = Traits::kSmemBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  const int64_t resident = resident_pairs<Traits>(config);
  // No more pairs than there can be tiles: every sequence has at most one that is not full.
  const AttentionParams& a = p.attention;
  const int64_t tiles = (static_cast<int64_t>(a.num_tokens) * p.group / kTileRows + a.num_seqs) * a.num_kv_heads;
  config.gridDim = static_cast<unsigned>(kClusterSize * std::max<int64_t>(1, std::min(resident, tiles)));
  config.numAttrs = a.pdl ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, prefill_kernel<Traits>, maps.key, maps.value, p), "paged_attention launch");
}

template <class T, int kHeadDim>
void launch_prefill_instance(const PrefillParams& p, const PrefillMaps& maps, cudaStream_t stream) {
  const bool score_mods = p.cap_log2 > 0.f || p.attention.alibi_slopes || !(p.scale_log2 > 0.f);
  if (score_mods)
    launch_prefill_kernel<PrefillTraits<T, kHeadDim, true>>(p, maps, stream);
  else
    launch_prefill_kernel<PrefillTraits<T, kHeadDim, false>>(p, maps, stream);
}

}  // namespace paged_attn::sm90
