/* Memory of attention for single queries, alike for all instruction sets. */
#ifndef SK_DECODE_H
#define SK_DECODE_H

#include "attend.h"

/* What some keys give: for every query head the largest score, 16 sums of exponentials to be added up at the end, and
   the values weighted by the exponentials. */
typedef struct {
  int width; /* head_dim, padded to whole registers */
  float *largest, *weights, *sums;
} sk_partial;

typedef struct {
  sk_partial all, block;
  float *q;        /* [heads, width], scaled */
  float *scores;   /* [heads, SK_KEY_BLOCK] */
  sk_rows queries; /* for keys in eight bits: q, rounded, with whole tiles for every KV head */
  size_t bytes;
} sk_decode_memory;

static inline int sk_partial_width(const sk_attention *a) { return (a->head_dim + 15) / 16 * 16; }

static inline sk_partial sk_partial_lay(const sk_attention *a, char *from, size_t *at) {
  const size_t heads = (size_t)a->heads, width = (size_t)sk_partial_width(a);
  sk_partial p = {.width = (int)width};
  p.largest = sk_attend_take(from, at, heads);
  p.weights = sk_attend_take(from, at, heads * 16);
  p.sums = sk_attend_take(from, at, heads * width);
  return p;
}

static inline size_t sk_partial_bytes(const sk_attention *a) {
  size_t bytes = 0;
  sk_partial_lay(a, NULL, &bytes);
  return bytes;
}

static inline sk_partial sk_partial_at(const sk_attention *a, char *parts, size_t index) {
  size_t at = 0;
  return sk_partial_lay(a, parts + index * sk_partial_bytes(a), &at);
}

/* Lays the arrays into `from`, which is aligned to 64 bytes, or measures them where it is NULL. */
static inline sk_decode_memory sk_decode_lay(const sk_attention *a, char *from) {
  sk_decode_memory m = {.bytes = 0};
  m.all = sk_partial_lay(a, from, &m.bytes);
  m.block = sk_partial_lay(a, from, &m.bytes);
  m.q = sk_attend_take(from, &m.bytes, (size_t)a->heads * (size_t)m.all.width);
  m.scores = sk_attend_take(from, &m.bytes, (size_t)a->heads * SK_KEY_BLOCK);
  m.queries = sk_queries_lay(a->heads + a->kv_heads * (SK_ROW_PAD - 1), a->head_dim, from, &m.bytes);
  return m;
}

#endif
