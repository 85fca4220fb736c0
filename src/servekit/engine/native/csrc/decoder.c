/* One step of a decoder: every layer in one call, so that nothing but arithmetic lies between two products. */
#include <string.h>

#include "context.h"

/* What the phases of a layer work on. */
typedef struct {
  sk_context *context;
  const sk_decoder *decoder;
  const sk_layer *layer;
  const sk_batch *batch;
  float *x;   /* [T, hidden]: the residual stream */
  float *qkv; /* [T, heads + 2 kv_heads, head_dim] */
  float *attended, *projected;
  const float *weight; /* of the norm in hand */
  const float *from;
  float *to;
  int add;
  sk_rows hidden, wide;
} step;

static void norm_quantise_rows(void *job, int first, int last) {
  const step *s = job;
  s->context->kernels->norm_quantise(s->x, s->weight, s->decoder->eps, s->decoder->hidden, first, last, &s->hidden);
}

static void rotate_rows(void *job, int first, int last) {
  const step *s = job;
  s->context->kernels->rotate(s->layer, s->batch, s->decoder->kv_dtype, s->decoder->eps, s->qkv, first, last);
}

static void norm_rows(void *job, int first, int last) {
  const step *s = job;
  s->context->kernels->norm(s->from, s->weight, s->decoder->eps, s->decoder->hidden, first, last, s->to, s->add);
}

/* x += m(in), through a norm in the families that have one behind the product. */
static void add_product(step *s, const sk_matrix *m, const sk_rows *in, const float *post_norm) {
  const int tokens = s->batch->tokens;
  const size_t hidden = (size_t)s->decoder->hidden;
  if (!post_norm) {
    sk_multiply(s->context, m, in, s->x, hidden, 1);
    return;
  }
  sk_multiply(s->context, m, in, s->projected, hidden, 0);
  s->from = s->projected;
  s->to = s->x;
  s->weight = post_norm;
  s->add = 1;
  sk_each_row(s->context, norm_rows, s, tokens);
}

/* Without a KV cache, keys and values of the step are put side by side for attention. They keep float32. */
static void gather_step_kv(void *job, int first, int last) {
  const step *s = job;
  const sk_attention *a = &s->layer->attention;
  const size_t token = (size_t)(a->heads + 2 * a->kv_heads) * a->head_dim, kv = (size_t)2 * a->kv_heads * a->head_dim;
  for (int i = first; i < last; i++)
    memcpy(s->projected + i * kv, s->qkv + i * token + (size_t)a->heads * a->head_dim, kv * sizeof(float));
}

static int attend(step *s) {
  const sk_attention *a = &s->layer->attention;
  const size_t ld = (size_t)(a->heads + 2 * a->kv_heads) * a->head_dim;
  sk_each_row(s->context, rotate_rows, s, s->batch->tokens);
  if (s->batch->slot_mapping)
    return sk_attend_batch(s->context, a, s->batch, s->qkv, ld, s->layer->cache, s->decoder->kv_dtype, s->attended);
  sk_each_row(s->context, gather_step_kv, s, s->batch->tokens);
  return sk_attend_batch(s->context, a, s->batch, s->qkv, ld, s->projected, SK_KV_F32, s->attended);
}

typedef struct {
  const step *s;
  int units, chunks;
} glu_phase;

static void run_glu(void *job, int chunk, int thread) {
  (void)thread;
  const glu_phase *p = job;
  p->s->context->kernels->glu(&p->s->layer->gate_up, &p->s->hidden, sk_share(p->units, chunk, p->chunks),
                              sk_share(p->units, chunk + 1, p->chunks), p->s->decoder->activation, &p->s->wide);
}

static int run_layer(step *s) {
  const sk_layer *layer = s->layer;
  const int tokens = s->batch->tokens;
  sk_context *context = s->context;

  if (sk_reserve_rows(context, 0, tokens, &layer->qkv, &s->hidden) != 0) return -1;
  s->weight = layer->input_norm;
  sk_each_row(context, norm_quantise_rows, s, tokens);
  sk_multiply(context, &layer->qkv, &s->hidden, s->qkv, (size_t)layer->qkv.n, 0);
  if (attend(s) != 0) return -1;
  if (sk_reserve_rows(context, 1, tokens, &layer->output, &s->wide) != 0) return -1;
  sk_quantise(context, s->attended, layer->output.k, &s->wide);
  add_product(s, &layer->output, &s->wide, layer->post_attention_norm);

  s->weight = layer->mlp_norm;
  if (sk_reserve_rows(context, 0, tokens, &layer->gate_up, &s->hidden) != 0) return -1;
  sk_each_row(context, norm_quantise_rows, s, tokens);
  if (sk_reserve_rows(context, 1, tokens, &layer->down, &s->wide) != 0) return -1;
  glu_phase phase = {s, layer->gate_up.n_padded / (4 * SK_PANEL), 0};
  phase.chunks = sk_chunks(context, phase.units, tokens);
  for (int row = 0; row < tokens; row++) sk_clear_row(&s->wide, row, phase.units); /* padding, which no unit writes */
  sk_pool_run(context->pool, run_glu, &phase, phase.chunks);
  add_product(s, &layer->down, &s->wide, layer->post_mlp_norm);
  return 0;
}

int sk_forward(sk_context *context, const sk_decoder *decoder, const sk_batch *batch, float *x, float *out) {
  const size_t tokens = (size_t)batch->tokens;
  if (tokens == 0) return 0;
  size_t wide = 0, attended = 0, projected = (size_t)decoder->hidden;
  for (int i = 0; i < decoder->num_layers; i++) {
    const sk_attention *a = &decoder->layers[i].attention;
    const size_t heads = (size_t)a->heads * a->head_dim, kv = (size_t)2 * a->kv_heads * a->head_dim;
    wide = heads + kv > wide ? heads + kv : wide;
    attended = heads > attended ? heads : attended;
    projected = kv > projected ? kv : projected;
  }
  step s = {.context = context, .decoder = decoder, .batch = batch, .x = x};
  s.qkv = sk_reserve(&context->qkv, tokens * wide * sizeof(float));
  s.attended = sk_reserve(&context->attended, tokens * attended * sizeof(float));
  s.projected = sk_reserve(&context->projected, tokens * projected * sizeof(float));
  if (!s.qkv || !s.attended || !s.projected) return -1;
  for (int i = 0; i < decoder->num_layers; i++) {
    s.layer = &decoder->layers[i];
    if (run_layer(&s) != 0) return -1;
  }
  s.from = x;
  s.to = out;
  s.weight = decoder->final_norm;
  s.add = 0;
  sk_each_row(context, norm_rows, &s, (int)tokens);
  return 0;
}
