/* One step of an encoder: whole texts, attended within themselves, every layer in one call. */
#include <string.h>

#include "context.h"

/* What the phases of a layer work on. */
typedef struct {
  sk_context *context;
  const sk_encoder *encoder;
  const sk_encoder_layer *layer;
  const sk_batch *batch;
  float *x; /* [T, hidden]: the residual stream */
  float *qkv, *kv, *attended;
  const float *weight, *bias; /* of the norm in hand */
  int keep;                   /* whether the norm replaces the stream */
  const sk_rows *normed;      /* where it goes besides; NULL: nowhere */
  sk_rows hidden, wide;
} step;

static void norm_rows(void *job, int first, int last) {
  const step *s = job;
  s->context->kernels->layer_norm(s->x, s->weight, s->bias, s->encoder->eps, s->encoder->hidden, first, last, s->keep,
                                  s->normed);
}

static void normalise(step *s, const float *weight, const float *bias, int keep, const sk_rows *out) {
  s->weight = weight;
  s->bias = bias;
  s->keep = keep;
  s->normed = out;
  sk_each_row(s->context, norm_rows, s, s->batch->tokens);
}

/* Rotation, and keys and values side by side as attention reads them. */
static void prepare_heads(void *job, int first, int last) {
  const step *s = job;
  const sk_attention *a = &s->layer->attention;
  const size_t heads = (size_t)a->heads * a->head_dim, kv = 2 * (size_t)a->kv_heads * a->head_dim, ld = heads + kv;
  if (s->layer->cos)
    s->context->kernels->turn(s->layer->cos, s->layer->sin, s->batch->positions, s->qkv, ld, a->heads + a->kv_heads,
                              a->head_dim, first, last);
  for (int i = first; i < last; i++) memcpy(s->kv + i * kv, s->qkv + i * ld + heads, kv * sizeof(float));
}

typedef struct {
  const step *s;
  int units, chunks;
} up_phase;

static void run_up(void *job, int chunk, int thread) {
  (void)thread;
  const up_phase *p = job;
  const step *s = p->s;
  const sk_kernels *kernels = s->context->kernels;
  (s->encoder->gated ? kernels->glu : kernels->activated)(&s->layer->up, &s->hidden, sk_share(p->units, chunk, p->chunks),
                                                          sk_share(p->units, chunk + 1, p->chunks),
                                                          s->encoder->activation, &s->wide);
}

/* x += the attention of the rows in s->hidden. */
static int attend(step *s) {
  const sk_encoder_layer *layer = s->layer;
  const int tokens = s->batch->tokens;
  sk_multiply(s->context, &layer->qkv, &s->hidden, s->qkv, (size_t)layer->qkv.n, 0);
  sk_each_row(s->context, prepare_heads, s, tokens);
  if (sk_attend_batch(s->context, &layer->attention, s->batch, s->qkv, (size_t)layer->qkv.n, s->kv, SK_KV_F32,
                      s->attended) != 0)
    return -1;
  if (sk_reserve_rows(s->context, 1, tokens, &layer->output, &s->wide) != 0) return -1;
  sk_quantise(s->context, s->attended, layer->output.k, &s->wide);
  sk_multiply(s->context, &layer->output, &s->wide, s->x, (size_t)s->encoder->hidden, 1);
  return 0;
}

/* x += the feed-forward block of the rows in s->hidden. */
static int feed(step *s) {
  const sk_encoder_layer *layer = s->layer;
  const int tokens = s->batch->tokens;
  if (sk_reserve_rows(s->context, 1, tokens, &layer->down, &s->wide) != 0) return -1;
  up_phase phase = {s, layer->up.n_padded / ((s->encoder->gated ? 4 : 2) * SK_PANEL), 0};
  phase.chunks = sk_chunks(s->context, phase.units, tokens);
  for (int row = 0; row < tokens; row++) sk_clear_row(&s->wide, row, phase.units); /* padding, which no unit writes */
  sk_pool_run(s->context->pool, run_up, &phase, phase.chunks);
  sk_multiply(s->context, &layer->down, &s->wide, s->x, (size_t)s->encoder->hidden, 1);
  return 0;
}

static int run_layer(step *s) {
  const sk_encoder_layer *layer = s->layer;
  const int tokens = s->batch->tokens, pre_norm = s->encoder->pre_norm;
  if (sk_reserve_rows(s->context, 0, tokens, &layer->qkv, &s->hidden) != 0) return -1;
  if (pre_norm && layer->attention_norm) normalise(s, layer->attention_norm, layer->attention_norm_bias, 0, &s->hidden);
  else sk_quantise(s->context, s->x, s->encoder->hidden, &s->hidden);
  if (attend(s) != 0) return -1;
  if (sk_reserve_rows(s->context, 0, tokens, &layer->up, &s->hidden) != 0) return -1;
  if (pre_norm) normalise(s, layer->mlp_norm, layer->mlp_norm_bias, 0, &s->hidden);
  else normalise(s, layer->attention_norm, layer->attention_norm_bias, 1, &s->hidden);
  if (feed(s) != 0) return -1;
  if (!pre_norm) normalise(s, layer->mlp_norm, layer->mlp_norm_bias, 1, NULL);
  return 0;
}

int sk_encode(sk_context *context, const sk_encoder *encoder, const sk_batch *batch, float *x) {
  const size_t tokens = (size_t)batch->tokens;
  if (tokens == 0) return 0;
  const sk_attention *a = &encoder->layers[0].attention;
  const size_t heads = (size_t)a->heads * a->head_dim, kv = 2 * (size_t)a->kv_heads * a->head_dim;
  step s = {.context = context, .encoder = encoder, .batch = batch, .x = x};
  s.qkv = sk_reserve(&context->qkv, tokens * (heads + kv) * sizeof(float));
  s.kv = sk_reserve(&context->projected, tokens * kv * sizeof(float));
  s.attended = sk_reserve(&context->attended, tokens * heads * sizeof(float));
  if (!s.qkv || !s.kv || !s.attended) return -1;
  normalise(&s, encoder->embedding_norm, encoder->embedding_norm_bias, 1, NULL);
  for (int i = 0; i < encoder->num_layers; i++) {
    s.layer = &encoder->layers[i];
    if (run_layer(&s) != 0) return -1;
  }
  if (encoder->final_norm) normalise(&s, encoder->final_norm, encoder->final_norm_bias, 1, NULL);
  return 0;
}
