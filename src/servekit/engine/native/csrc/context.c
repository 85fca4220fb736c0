#include "context.h"

#include <stdlib.h>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#include <string.h>

int sk_abi(void) { return SK_ABI; }

/* ---- which kernels ---- */

/* Best first. */
static const sk_kernels *const all_kernels[] = {
#if defined(__x86_64__)
    &sk_kernels_avx512bf16, &sk_kernels_avx512, &sk_kernels_avx2,
#elif defined(__aarch64__)
    &sk_kernels_neon,
#endif
    &sk_kernels_generic,
};
#define NUM_KERNELS ((int)(sizeof all_kernels / sizeof *all_kernels))

#if defined(__aarch64__)
static int has_dot_products(void) {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return 1; /* Apple's have all had them since the first */
#endif
}
#endif

static int runs_here(const sk_kernels *kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni");
  if (kernels == &sk_kernels_avx2) return avx2;
  if (kernels == &sk_kernels_avx512) return avx512;
  if (kernels == &sk_kernels_avx512bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
  if (kernels == &sk_kernels_neon) return has_dot_products();
#endif
  return kernels != NULL;
}

const char *sk_isa(int index) {
  for (int i = 0; i < NUM_KERNELS; i++)
    if (runs_here(all_kernels[i]) && index-- == 0) return all_kernels[i]->name;
  return NULL;
}

static const sk_kernels *choose(const char *isa) {
  for (int i = 0; i < NUM_KERNELS; i++)
    if (runs_here(all_kernels[i]) && (!isa || strcmp(isa, all_kernels[i]->name) == 0)) return all_kernels[i];
  return NULL;
}

/* ---- memory ---- */

sk_context *sk_open(const char *isa, int threads) {
  const sk_kernels *kernels = choose(isa);
  if (!kernels || threads < 1) return NULL;
  sk_context *context = calloc(1, sizeof *context);
  if (!context) return NULL;
  context->kernels = kernels;
  context->threads = threads;
  context->per_thread = calloc((size_t)threads, sizeof *context->per_thread);
  context->pool = sk_pool_open(threads);
  if (context->per_thread && context->pool) return context;
  sk_close(context);
  return NULL;
}

void sk_close(sk_context *context) {
  if (!context) return;
  sk_pool_close(context->pool);
  sk_buffer *own[] = {&context->rows[0], &context->rows[1],   &context->qkv,
                      &context->attended, &context->projected, &context->units, &context->ranges, &context->parts};
  for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]->data);
  for (int i = 0; context->per_thread && i < context->threads; i++) free(context->per_thread[i].data);
  free(context->per_thread);
  free(context);
}

void *sk_reserve(sk_buffer *buffer, size_t size) {
  if (buffer->size >= size && buffer->data) return buffer->data;
  free(buffer->data);
  size = (size + size / 4 + 4095) / 4096 * 4096;
  buffer->data = aligned_alloc(64, size);
  buffer->size = buffer->data ? size : 0;
  return buffer->data;
}

int sk_reserve_rows(sk_context *context, int which, int rows, const sk_matrix *m, sk_rows *out) {
  /* Tiles as equal as can be: 13 rows are 7 and 6, not 12 and 1. */
  const int tiles = (rows + context->kernels->max_tile - 1) / context->kernels->max_tile;
  const int tile = (rows + tiles - 1) / tiles;
  const int is_bf16 = m->format == SK_BF16;
  const size_t groups = (size_t)tiles * tile * (m->k_padded / SK_GROUP), bytes = groups * SK_GROUP * (is_bf16 ? 2 : 1);
  char *at = sk_reserve(&context->rows[which], bytes + (is_bf16 ? 0 : 3 * groups * sizeof(float)));
  if (!at) return -1;
  float *d = (float *)(at + bytes);
  *out = (sk_rows){at, d, d + groups, (int32_t *)(d + 2 * groups), rows, m->k_padded, tile, is_bf16};
  for (int row = rows; row < tiles * tile; row++) sk_clear_row(out, row, 0);
  return 0;
}

void sk_clear_row(const sk_rows *rows, int row, int first_group) {
  for (int g = first_group; g < rows->k_padded / SK_GROUP; g++) {
    const size_t at = sk_group_at(rows, row, g);
    const size_t bytes = SK_GROUP * (rows->is_bf16 ? 2 : 1);
    memset((char *)rows->q + at * bytes, 0, bytes);
    if (rows->is_bf16) continue;
    rows->d[at] = rows->s[at] = 0.0f;
    rows->z[at] = 0;
  }
}

/* ---- phases ---- */

/* Below this many rows the caller does them alone. */
#define FEW_ROWS 4

int sk_chunks(const sk_context *context, int count, int rows) {
  int chunks = context->threads * (rows >= 32 ? 8 : 4);
  return count < chunks ? count : chunks;
}

typedef struct {
  sk_row_task task;
  void *job;
  int rows, chunks;
} row_phase;

static void run_rows(void *job, int chunk, int thread) {
  (void)thread;
  const row_phase *phase = job;
  phase->task(phase->job, sk_share(phase->rows, chunk, phase->chunks), sk_share(phase->rows, chunk + 1, phase->chunks));
}

void sk_each_row(sk_context *context, sk_row_task task, void *job, int rows) {
  if (rows < FEW_ROWS || context->threads == 1) {
    task(job, 0, rows);
    return;
  }
  row_phase phase = {task, job, rows, sk_chunks(context, rows / 2, rows)};
  sk_pool_run(context->pool, run_rows, &phase, phase.chunks);
}

typedef struct {
  const sk_kernels *kernels;
  const float *x;
  int k;
  const sk_rows *out;
} quantise_job;

static void run_quantise(void *job, int first, int last) {
  const quantise_job *j = job;
  j->kernels->quantise(j->x, j->k, first, last, j->out);
}

void sk_quantise(sk_context *context, const float *x, int k, const sk_rows *out) {
  quantise_job job = {context->kernels, x, k, out};
  sk_each_row(context, run_quantise, &job, out->rows);
}

typedef struct {
  const sk_kernels *kernels;
  const sk_matrix *m;
  const sk_rows *x;
  int panels, chunks, add;
  float *out;
  size_t ld;
} product_phase;

static void run_product(void *job, int chunk, int thread) {
  (void)thread;
  const product_phase *p = job;
  p->kernels->linear(p->m, p->x, sk_share(p->panels, chunk, p->chunks), sk_share(p->panels, chunk + 1, p->chunks),
                     p->out, p->ld, p->add);
}

void sk_multiply(sk_context *context, const sk_matrix *m, const sk_rows *x, float *out, size_t ld, int add) {
  const int panels = (m->n + SK_PANEL - 1) / SK_PANEL;
  product_phase phase = {context->kernels, m, x, panels, sk_chunks(context, panels, x->rows), add, out, ld};
  sk_pool_run(context->pool, run_product, &phase, phase.chunks);
}

/* ---- single operations ---- */

int sk_linear(sk_context *context, const sk_matrix *matrix, const float *x, int rows, float *out) {
  sk_rows quantised;
  if (rows == 0) return 0;
  if (sk_reserve_rows(context, 0, rows, matrix, &quantised) != 0) return -1;
  sk_quantise(context, x, matrix->k, &quantised);
  sk_multiply(context, matrix, &quantised, out, (size_t)matrix->n, 0);
  return 0;
}

typedef struct {
  const sk_kernels *kernels;
  const sk_attention *a;
  const sk_batch *batch;
  const float *kv;
  int kv_dtype;
  void *cache;
} write_job;

static void run_write(void *job, int first, int last) {
  const write_job *j = job;
  j->kernels->write_kv(j->a, j->batch, j->kv, j->kv_dtype, j->cache, first, last);
}

void sk_write_kv(sk_context *context, const sk_attention *attention, const sk_batch *batch, const float *kv,
                 int kv_dtype, void *cache) {
  write_job job = {context->kernels, attention, batch, kv, kv_dtype, cache};
  sk_each_row(context, run_write, &job, batch->tokens);
}

int sk_attend(sk_context *context, const sk_attention *attention, const sk_batch *batch, const float *q,
              const void *kv, int kv_dtype, float *out) {
  return sk_attend_batch(context, attention, batch, q, (size_t)attention->heads * attention->head_dim, kv, kv_dtype,
                         out);
}

typedef struct {
  const sk_context *context;
  const float *scores;
  int n;
  const sk_choice *choices;
  int64_t *out;
} choose_job;

static void run_choose(void *job, int chunk, int thread) {
  const choose_job *j = job;
  j->out[chunk] = j->context->kernels->choose(j->scores + (size_t)chunk * j->n, j->n, &j->choices[chunk],
                                              j->context->per_thread[thread].data);
}

int sk_choose(sk_context *context, const float *scores, int rows, int n, const sk_choice *choices, int64_t *out) {
  for (int i = 0; i < context->threads; i++)
    if (!sk_reserve(&context->per_thread[i], 2 * (size_t)n * sizeof(float))) return -1;
  choose_job job = {context, scores, n, choices, out};
  sk_pool_run(context->pool, run_choose, &job, rows);
  return 0;
}
