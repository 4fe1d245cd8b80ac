// The attention kernels for x86 with AVX512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "attention.h"
#include "types.h"

// Everything that follows is compiled for this instruction set and lies in a namespace of its own; headers that others
// share come before.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif

#define PAGED_ATTN_ISA avx512
#define PAGED_ATTN_LANES 16
#include "attention_isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
