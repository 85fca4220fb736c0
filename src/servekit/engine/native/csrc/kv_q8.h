/* Where keys and values in eight bits (SK_KV_Q8_0 of servekit.h) lie, alike for all instruction sets. */
#ifndef SK_KV_Q8_H
#define SK_KV_Q8_H

#include "kernels.h"

/* From the beginning of a head's part of a tile to its parts, and to the next head's, in bytes. */
static inline size_t sk_key_scales_at(int head_dim) { return (size_t)SK_KV_TILE * (size_t)head_dim; }
static inline size_t sk_values_at(int head_dim) { return (size_t)17 * (size_t)head_dim; }
static inline size_t sk_value_scales_at(int head_dim) { return (size_t)33 * (size_t)head_dim; }
static inline size_t sk_head_bytes(int head_dim) { return (size_t)34 * (size_t)head_dim; }

#endif
