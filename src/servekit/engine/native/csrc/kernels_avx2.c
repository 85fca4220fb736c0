/* Kernels for AVX2 with FMA and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#define SK_ISA avx2
#define SK_TARGET "avx2,fma,f16c,bmi2"
#include "target_begin.h"
#include "simd_avx2.h"
#include "tiles_avx2.h"
#include "kernels.inc"
#include "target_end.h"
#else
typedef int sk_not_for_this_cpu; /* ISO C wants something in every file */
#endif
