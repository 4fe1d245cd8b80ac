#include "tensor_core.cuh"

namespace paged_attn::mma {

template void launch_tensor_core<__half, 64>(const AttentionParams&, QueryRange, bool, Workspace&, cudaStream_t);

}  // namespace paged_attn::mma
