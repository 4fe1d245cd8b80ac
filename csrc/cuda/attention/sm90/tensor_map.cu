#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace paged_attn::sm90 {
namespace {

struct Hash {
  size_t operator()(const TensorMapSpec& s) const {
    uint64_t h = reinterpret_cast<uintptr_t>(s.base);
    const auto mix = [&h](uint64_t x) { h = (h ^ x) * 0x9e3779b97f4a7c15ull, h ^= h >> 29; };
    for (const auto x : s.sizes) mix(x);
    for (const auto x : s.strides) mix(x);
    for (const auto x : s.box) mix(x);
    mix(static_cast<uint64_t>(s.element_size * 256 + s.swizzle));
    return h;
  }
};

// From the driver that is loaded, so that the library links against no libcuda.
decltype(&cuTensorMapEncodeTiled) find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
    throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled (needs 12.0 or newer)");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

CUtensorMapSwizzle swizzle_mode(int bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : CU_TENSOR_MAP_SWIZZLE_32B;
}

CUtensorMap encode(const TensorMapSpec& s) {
  static const auto encoder = find_encoder();
  CUtensorMap map;
  const std::array<uint32_t, 5> unit_steps = {1, 1, 1, 1, 1};
  // No L2 promotion: fetching 256 bytes for every 128 asked costs decode 6%.
  const CUresult result =
      encoder(&map, s.element_size == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 5,
              const_cast<void*>(s.base), s.sizes.data(), s.strides.data(), s.box.data(), unit_steps.data(),
              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_mode(s.swizzle), CU_TENSOR_MAP_L2_PROMOTION_NONE,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with error " + std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace

CUtensorMap tensor_map(const TensorMapSpec& spec) {
  constexpr size_t kMaxMaps = 4096;  // then start anew: a bound on memory, reached only where caches come and go
  static std::mutex mutex;
  static std::unordered_map<TensorMapSpec, CUtensorMap, Hash> maps;
  const std::lock_guard lock(mutex);
  const auto found = maps.find(spec);
  if (found != maps.end()) return found->second;
  if (maps.size() == kMaxMaps) maps.clear();
  return maps.emplace(spec, encode(spec)).first->second;
}

}  // namespace paged_attn::sm90
