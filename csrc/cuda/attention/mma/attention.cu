#include <stdexcept>

#include "../paths.h"

namespace paged_attn::mma {

int decode_max_rows() { return 16; }
void launch_decode(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {
  throw std::runtime_error("paged_attention: no CUDA kernel yet");
}
void launch_prefill(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {
  throw std::runtime_error("paged_attention: no CUDA kernel yet");
}

}  // namespace paged_attn::mma
