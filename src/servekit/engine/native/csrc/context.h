/* What a caller of the kernels holds: threads, the chosen kernels, and scratch memory that grows with use. */
#ifndef SK_CONTEXT_H
#define SK_CONTEXT_H

#include "kernels.h"
#include "pool.h"

typedef struct {
  void *data; /* 64-byte aligned */
  size_t size;
} sk_buffer;

struct sk_context {
  const sk_kernels *kernels;
  sk_pool *pool;
  int threads;
  sk_buffer rows[2];    /* quantised rows: what a product reads, and what it writes for the next */
  sk_buffer qkv, attended, projected, units, ranges, parts;
  sk_buffer *per_thread; /* attention's scratch */
};

/* At least `size` bytes whose contents may be lost; NULL where there is no memory. */
void *sk_reserve(sk_buffer *buffer, size_t size);
/* Room in context->rows[which] for `rows` rows as the product with m reads them. Returns 0, or -1. */
int sk_reserve_rows(sk_context *context, int which, int rows, const sk_matrix *m, sk_rows *out);
/* Zeros from `first_group` to the end of a row. */
void sk_clear_row(const sk_rows *rows, int row, int first_group);

/* Work over rows 0..rows - 1, at once where the rows are few: a phase costs more than a small norm. */
typedef void (*sk_row_task)(void *job, int first, int last);
void sk_each_row(sk_context *context, sk_row_task task, void *job, int rows);

/* x [out->rows, k] as the next product reads it. */
void sk_quantise(sk_context *context, const float *x, int k, const sk_rows *out);
/* Quantised x times m: stored in out, or added to it. */
void sk_multiply(sk_context *context, const sk_matrix *m, const sk_rows *x, float *out, size_t ld, int add);
/* Attention of all sequences, after their keys and values are in `kv`. Returns 0, or -1 where there is no memory. */
int sk_attend_batch(sk_context *context, const sk_attention *a, const sk_batch *batch, const float *q, size_t ld,
                    const void *kv, int kv_dtype, float *out);
/* first..last of `count` pieces for chunk number `chunk` of `chunks`. */
static inline int sk_share(int count, int chunk, int chunks) { return (int)((int64_t)count * chunk / chunks); }
/* How many chunks to cut `count` pieces into: several a thread, so that a slow one is not waited for. */
int sk_chunks(const sk_context *context, int count, int rows);

#endif
