// wgmma as the prefill kernel uses it: 64 rows by N columns by 16 deep, float32 accumulators, 16-bit operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace paged_attn::sm90 {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No use of x moves across this point: wgmma reads and writes its registers behind the compiler's back.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// A branch on x that is never taken: no instruction produces this NaN.  The assembler lifts a wait for wgmma above
// arithmetic, but not above a branch on its result: what x depends on stays before the wait that follows.  Of kernels
// with many threads it must be a branch of whole warps, of others it must not, or else every wgmma is waited for.
template <bool kManyThreads>
__device__ __forceinline__ void hold(float x) {
  if constexpr (kManyThreads)
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.eq.b32 p, %0, 0xffffffff;\nvote.sync.any.pred q, p, 0xffffffff;\n@q trap;\n}" ::"r"(
            __float_as_uint(x))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, %0, 0xffffffff;\n@!p bra HOLD;\nexit;\nHOLD:\n}" ::"r"(__float_as_uint(x))
        : "memory");
}

// A matrix in shared memory, rows of 128 bytes, swizzled in groups of 8 rows (1024 bytes, so aligned).  `group_stride`:
// bytes from one group of 8 rows to the next.  `column_stride`: bytes from one 64 columns to the next; of meaning only
// where the rows are the contraction (B transposed).
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int column_stride, int group_stride) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(column_stride >> 4) << 16 |
         static_cast<uint64_t>(group_stride >> 4) << 32 | 1ull << 62;
}

// Wgmma<N>::rs: d (+)= A B with A in registers; ::ss: A in shared memory, K-major.  B is K-major, or with kTransposed
// MN-major.
template <int N>
struct Wgmma;

// Operand lists: accumulators first, so that their numbers do not depend on what follows.
#define ACC8(i)                                                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ACC32(i) ACC8(i), ACC8(i + 8), ACC8(i + 16), ACC8(i + 24)
#define NAMES32                                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES40 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES48 NAMES40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES56 NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES64 NAMES32 ", " NAMES32_63
#define NAMES32_63                                                                                            \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES80 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES96 NAMES64 ", " NAMES64_95
#define NAMES64_95                                                                                            \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES128 NAMES96 ", " NAMES96_127
#define NAMES96_127                                                                                          \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_RS(N, TYPES, NAMES, A0, A1, A2, A3, B, KEEP, TRANSPOSED)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." TYPES " {" NAMES "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B         \
               ", p, 1, 1, %" #TRANSPOSED ";\n}"                                                       \
               : ACC_N##N                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTransposed))
#define WGMMA_SS(N, TYPES, NAMES, A, B, KEEP, TRANSPOSED)                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." TYPES " {" NAMES "}, %" #A ", %" #B ", p, 1, 1, 0, %" #TRANSPOSED ";\n}"     \
               : ACC_N##N                                                                              \
               : "l"(a), "l"(b), "r"(keep), "n"(kTransposed))
#define DEFINE_WGMMA(N, NAMES, I0, I1, I2, I3, I4, I5, I6)                                                  \
  template <>                                                                                               \
  struct Wgmma<N> {                                                                                         \
    template <class T, int kTransposed>                                                                     \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int keep) { \
      if constexpr (std::is_same_v<T, __half>)                                                              \
        WGMMA_RS(N, "f16.f16", NAMES, I0, I1, I2, I3, I4, I5, I6);                                          \
      else                                                                                                  \
        WGMMA_RS(N, "bf16.bf16", NAMES, I0, I1, I2, I3, I4, I5, I6);                                        \
    }                                                                                                       \
    template <class T, int kTransposed>                                                                     \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int keep) {        \
      if constexpr (std::is_same_v<T, __half>)                                                              \
        WGMMA_SS(N, "f16.f16", NAMES, I0, I1, I2, I3);                                                      \
      else                                                                                                  \
        WGMMA_SS(N, "bf16.bf16", NAMES, I0, I1, I2, I3);                                                    \
    }                                                                                                       \
  }

#define ACC_N64 ACC32(0)
#define ACC_N80 ACC32(0), ACC8(32)
#define ACC_N96 ACC32(0), ACC8(32), ACC8(40)
#define ACC_N112 ACC32(0), ACC8(32), ACC8(40), ACC8(48)
#define ACC_N128 ACC32(0), ACC32(32)
#define ACC_N160 ACC32(0), ACC32(32), ACC8(64), ACC8(72)
#define ACC_N192 ACC32(0), ACC32(32), ACC32(64)
#define ACC_N256 ACC32(0), ACC32(32), ACC32(64), ACC32(96)
DEFINE_WGMMA(64, NAMES32, 32, 33, 34, 35, 36, 37, 38);
DEFINE_WGMMA(80, NAMES40, 40, 41, 42, 43, 44, 45, 46);
DEFINE_WGMMA(96, NAMES48, 48, 49, 50, 51, 52, 53, 54);
DEFINE_WGMMA(112, NAMES56, 56, 57, 58, 59, 60, 61, 62);
DEFINE_WGMMA(128, NAMES64, 64, 65, 66, 67, 68, 69, 70);
DEFINE_WGMMA(160, NAMES80, 80, 81, 82, 83, 84, 85, 86);
DEFINE_WGMMA(192, NAMES96, 96, 97, 98, 99, 100, 101, 102);
DEFINE_WGMMA(256, NAMES128, 128, 129, 130, 131, 132, 133, 134);

#undef DEFINE_WGMMA
#undef WGMMA_RS
#undef WGMMA_SS
#undef ACC8
#undef ACC32
#undef ACC_N64
#undef ACC_N80
#undef ACC_N96
#undef ACC_N112
#undef ACC_N128
#undef ACC_N160
#undef ACC_N192
#undef ACC_N256
#undef NAMES32
#undef NAMES40
#undef NAMES48
#undef NAMES56
#undef NAMES64
#undef NAMES32_63
#undef NAMES80
#undef NAMES96
#undef NAMES64_95
#undef NAMES128
#undef NAMES96_127

}  // namespace paged_attn::sm90
