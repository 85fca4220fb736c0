/* What one instruction set offers. kernels.inc is compiled once for each of them; dispatch.c chooses. */
#ifndef SK_KERNELS_H
#define SK_KERNELS_H

#include "scalars.h"
#include "servekit.h"

#define SK_NAME_generic "generic"
#define SK_NAME_avx2 "avx2"
#define SK_NAME_avx512 "avx512"
#define SK_NAME_avx512bf16 "avx512bf16"
#define SK_NAME_neon "neon"

/* Rows quantised in groups of 32: value = d * q. `s` is d times the sum of a group's q, `z` is -128 times that sum.

   Rows lie in tiles of `tile` rows, and inside a tile group after group, as the products read them: with all distances
   known when a kernel is compiled. The last tile may have rows that nobody asked for; they are zero.

   For products with SK_BF16 the rows are bfloat16 instead, in the same places, and have no d, s and z. */
typedef struct {
  void *q;  /* [tiles, k_padded / 32, tile, 32] int8 or bfloat16, 64-byte aligned */
  float *d; /* [tiles, k_padded / 32, tile] */
  float *s;
  int32_t *z;
  int rows, k_padded, tile, is_bf16;
} sk_rows;

/* Where group g of a row lies, counted in groups. */
static inline size_t sk_group_at(const sk_rows *rows, int row, int g) {
  return ((size_t)(row / rows->tile) * (rows->k_padded / SK_GROUP) + g) * rows->tile + row % rows->tile;
}

/* With many rows a panel is read several times, and the CPU does not see that the next one comes after. So it is asked
   for while this one is in work, into the second-level cache: the first one has too few lines on their way at a time to
   wait for memory. With few rows it is read once, from one end to the other, and that it sees. From SK_ASK_ROWS on
   (measured for each instruction set) asking pays. */
static inline __attribute__((always_inline)) void sk_ask(const uint8_t *from, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* A piece of attention: queries [first, last) of one sequence, and one KV head with its query heads. */
typedef struct {
  int seq, first, last;
} sk_unit;

typedef struct {
  const char *name;
  int max_tile; /* rows of a tile at most: as many as registers hold */
  /* x [., k] rows first..last -> q. */
  void (*quantise)(const float *x, int k, int first, int last, const sk_rows *out);
  /* The same after a root-mean-square norm. */
  void (*norm_quantise)(const float *x, const float *weight, float eps, int k, int first, int last, const sk_rows *out);
  /* out = norm(x) * weight, or x += norm(y) * weight when `add` is set. */
  void (*norm)(const float *x, const float *weight, float eps, int k, int first, int last, float *out, int add);
  /* Mean and variance instead: x = norm(x) * weight + bias is left in x if `keep` is set, and goes to `out` (NULL: not). */
  void (*layer_norm)(float *x, const float *weight, const float *bias, float eps, int k, int first, int last, int keep,
                     const sk_rows *out);
  /* Panels first..last for all rows: out[row * ld + channel], or added to it. */
  void (*linear)(const sk_matrix *m, const sk_rows *x, int first, int last, float *out, size_t ld, int add);
  /* Panels of gate and up in turn, units of 4 panels = 32 products act(gate) * up, quantised for the next matrix. */
  void (*glu)(const sk_matrix *m, const sk_rows *x, int first, int last, int activation, const sk_rows *out);
  /* The same without gates: units of 2 panels = 32 activated channels. */
  void (*activated)(const sk_matrix *m, const sk_rows *x, int first, int last, int activation, const sk_rows *out);
  /* Rotation of heads alone: [heads, head_dim] of tokens first..last, `ld` floats apart. */
  void (*turn)(const float *cos, const float *sin, const int64_t *positions, float *heads, size_t ld, int num_heads,
               int head_dim, int first, int last);
  /* Norm of heads, rotation and cache write of tokens first..last; qkv [T, heads + 2 kv_heads, head_dim] in place. */
  void (*rotate)(const sk_layer *layer, const sk_batch *batch, int kv_dtype, float eps, float *qkv, int first, int last);
  /* Keys and values of tokens first..last into the cache; kv [T, 2, kv_heads, head_dim]. */
  void (*write_kv)(const sk_attention *a, const sk_batch *batch, const float *kv, int kv_dtype, void *cache, int first,
                   int last);
  /* One unit: q rows are `ld` floats apart and begin with head 0. scratch is as attend.h lays it. */
  void (*attend)(const sk_attention *a, const sk_batch *batch, const void *kv, int kv_dtype, const float *q, size_t ld,
                 const sk_unit *unit, int kv_head, float *out, void *scratch);
  /* The only query of a sequence, all heads, over its blocks of keys first..last (decode.inc): into parts, one a block,
     or into out where parts is NULL. q begins with head 0 of the query. */
  void (*decode)(const sk_attention *a, const sk_batch *batch, const void *kv, int kv_dtype, const float *q, int seq,
                 int first, int last, char *parts, float *out, void *scratch);
  void (*join)(const sk_attention *a, char *parts, int count, float *out, void *scratch);
  /* One token out of n scores; scratch is 2 n floats, and not needed for the most likely one. */
  int64_t (*choose)(const float *x, int n, const sk_choice *choice, float *scratch);
} sk_kernels;

/* Most queries of a unit. */
#define SK_QUERY_TILE 32

extern const sk_kernels sk_kernels_generic;
#if defined(__x86_64__)
extern const sk_kernels sk_kernels_avx2;
extern const sk_kernels sk_kernels_avx512;
extern const sk_kernels sk_kernels_avx512bf16;
#elif defined(__aarch64__)
extern const sk_kernels sk_kernels_neon;
#endif

#endif
