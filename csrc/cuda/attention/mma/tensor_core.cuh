// Launches the tensor-core kernel of one type and head dimension; one .cu an instance.
#pragma once

#include "attention_kernel.cuh"
#include "launch_attention.cuh"

namespace paged_attn::mma {

// The largest copy that every row allows, in bytes: 16, 8, or 1 for element by element.
inline int copy_bytes(std::initializer_list<const void*> bases, std::initializer_list<int64_t> strides,
                      int64_t row_bytes, int element_size) {
  uint64_t all = static_cast<uint64_t>(row_bytes);
  for (const void* base : bases) all |= reinterpret_cast<uintptr_t>(base);
  for (int64_t stride : strides) all |= static_cast<uint64_t>(stride * element_size);
  return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : 1;
}

// Stages of the ring for `ctas` CTAs an SM; 0: too few.
template <class C>
int stages_that_fit(const DeviceInfo& device, int ctas) {
  const int bytes = std::min(device.smem_per_sm / ctas - device.smem_reserved, device.smem_per_block);
  int stages = 4;
  while (stages > 0 && C::smem_bytes(stages) > bytes) --stages;
  return stages < (C::kDecode && ctas > 1 ? 3 : 2) ? 0 : stages;
}

template <class C>
bool fits(const DeviceInfo& device) {
  return stages_that_fit<C>(device, 1) > 0;
}

template <class C>
void launch_config(KernelArgs args, Workspace& workspace, cudaStream_t stream, const DeviceInfo& device) {
  int ctas = kCtasPerSm;
  while (ctas > 1 && stages_that_fit<C>(device, ctas) == 0) --ctas;
  args.stages = stages_that_fit<C>(device, ctas);
  // Exactly `ctas` CTAs an SM: were there room for more, a grid that starts early could double up on some SMs.
  const int smem =
      std::min(std::max(C::smem_bytes(args.stages), device.smem_per_sm / (ctas + 1)), device.smem_per_block);
  KernelShape shape;
  shape.tile = {C::kRows, C::kKeys};
  shape.threads = C::kThreads;
  shape.smem_bytes = smem;
  shape.num_ctas = device.sm_count * ctas;
  shape.row_stride = C::kHeadDim;
  shape.min_share = C::kDecode ? 2 : 4;
  shape.splits_units = C::kDecode;
  launch_attention(attention_kernel<C>, shape, args, workspace, stream, device);
}

template <class T, int kHeadDim>
void launch_tensor_core(const AttentionParams& p, QueryRange range, bool decode, Workspace& workspace,
                        cudaStream_t stream) {
  const DeviceInfo device = current_device();
  KernelArgs args = {};
  args.p = p;
  args.range = range;
  args.query_bytes = copy_bytes({p.query}, {p.query_strides.token, p.query_strides.head}, p.head_dim * 2, 2);
  const int size = element_size(p.cache_dtype);
  args.cache_bytes = copy_bytes({p.key_cache, p.value_cache},
                                {p.key_strides.block, p.key_strides.slot, p.key_strides.head, p.value_strides.block,
                                 p.value_strides.slot, p.value_strides.head},
                                p.head_dim * size, size);
  // Where shared memory is small, either kernel can do the other's work.
  auto launch = [&](auto quantized) {
    using Decode = Config<T, kHeadDim, decltype(quantized)::value, true>;
    using Prefill = Config<T, kHeadDim, decltype(quantized)::value, false>;
    if (decode ? fits<Decode>(device) : !fits<Prefill>(device))
      launch_config<Decode>(args, workspace, stream, device);
    else
      launch_config<Prefill>(args, workspace, stream, device);
  };
  if (is_quantized(p.cache_dtype))
    launch(std::true_type());
  else
    launch(std::false_type());
}

}  // namespace paged_attn::mma
