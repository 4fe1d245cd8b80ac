// Launching the cache kernels so that each may start while the kernel before it on the stream drains.
#pragma once

#include "attention/launch.h"
#include "attention/ptx.cuh"

namespace paged_attn {

// Whether the code this device runs was compiled for sm_90 or later and so waits for the kernel before it: code
// compiled at run time from older PTX does not.
template <class Kernel>
bool waits_for_dependency(Kernel* kernel) {
  constexpr int kMaxDevices = 64;
  static int known[kMaxDevices];  // 0: not yet asked; else the PTX version
  const int device = current_device().id;
  int version = device < kMaxDevices ? __atomic_load_n(&known[device], __ATOMIC_RELAXED) : 0;
  if (version == 0) {
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "cudaFuncGetAttributes");
    version = attributes.ptxVersion;
    if (device < kMaxDevices) __atomic_store_n(&known[device], version, __ATOMIC_RELAXED);
  }
  return version >= 90;
}

// `kernel` calls ptx::pdl_wait before it touches memory that kernels ahead of it may write or read.
template <class... Params, class... Args>
void launch_pdl(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, Args&&... args) {
  launch_kernel(kernel, grid, block, 0, stream, waits_for_dependency(kernel), std::forward<Args>(args)...);
}

// ---- Rows that a kernel will read, brought into L2 while it waits for the kernel ahead.  Nothing is read, so what the
// kernel ahead still writes there comes out right.
__device__ __forceinline__ void prefetch_sector(const void* p) {  // 32 bytes
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
#endif
}

// How many CTAs of a grid prefetch: the first ones, which wait while the kernel ahead ends.  Others need not wait, and
// memory brings no more than so many bytes in that time.
inline int prefetching_ctas(int bytes_per_cta, int bytes_an_sm) {
  const DeviceInfo device = current_device();
  return device.major >= 9 ? static_cast<int>(int64_t{device.sm_count} * bytes_an_sm / bytes_per_cta) : 0;
}

}  // namespace paged_attn
