/* Kernels for AVX-512 with VNNI. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#define SK_ISA avx512
#define SK_TARGET "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#include "target_begin.h"
#include "simd_avx512.h"
#include "tiles_avx512.h"
#include "kernels.inc"
#include "target_end.h"
#else
typedef int sk_not_for_this_cpu; /* ISO C wants something in every file */
#endif
