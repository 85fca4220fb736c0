/* Kernels for NEON with the dot product instructions of ARMv8.2. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernels.h"

#define SK_ISA neon
#if defined(__clang__)
#define SK_TARGET "dotprod"
#else
#define SK_TARGET "arch=armv8.2-a+dotprod"
#endif
#include "target_begin.h"
#include "simd_neon.h"
#include "tiles_neon.h"
#include "kernels.inc"
#include "target_end.h"
#else
typedef int sk_not_for_this_cpu; /* ISO C wants something in every file */
#endif
