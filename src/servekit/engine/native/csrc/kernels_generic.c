/* Kernels in plain C. */
#include "kernels.h"

#define SK_ISA generic
#include "simd_generic.h"
#include "tiles_generic.h"
#include "kernels.inc"
