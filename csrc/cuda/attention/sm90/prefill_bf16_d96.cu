#include "prefill_launch.cuh"

template void paged_attn::sm90::launch_prefill_instance<__nv_bfloat16, 96>(const PrefillParams&, const PrefillMaps&,
                                                                           cudaStream_t);
