#include "decode_instances.h"

namespace paged_attn::sm90 {
template void launch_for<__half>(DecodeArgs&, Workspace&, cudaStream_t);
}
