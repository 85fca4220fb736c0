/* The C interface of servekit's CPU kernels: plain pointers and sizes, called from Python through ctypes.

   Neither Python's nor torch's ABI is used. Nothing here allocates what the caller keeps, and nothing checks its
   arguments twice: engine/native/library.py is the only caller and says what shapes it passes.

   Weights lie in panels of 16 output channels, groups of 32 inputs inside, whatever the instruction set, so that a
   packed file serves every CPU:
     SK_Q4  a group is 4 x 64 bytes of nibbles, 16 scales and 16 minimums in float16: w = scale * q + minimum, q 0..15.
            Byte 4*c + j of chunk i holds input 8*i + j (low nibble) and 8*i + 4 + j (high) of channel c.
     SK_Q8  a pair of groups is 16 x 64 bytes and 2 x 16 scales in float16: w = scale * (q - 128), q 1..255.
            Byte 4*c + j of chunk i (0..15) holds input 4*i + j of channel c; chunks 8 to 15 are the second group.
     SK_BF16  a group is 16 x 64 bytes of bfloat16. Element 2*c + j of chunk i holds input 2*i + j of channel c.
   Products read their other factor in the same manner: int8 with a scale for each row and group, or bfloat16.
   Inputs are padded to a multiple of 64, channels to 16, both with zeros.

   Keys and values of a layer lie in blocks, and a slot is a place in them: block * block_size + place in the block.
     SK_KV_F32, SK_KV_BF16  [slots, 2, kv_heads, head_dim], keys first.
     SK_KV_Q8_0  int8 with a scale in float16 for every 32 elements of a head, x = scale * q. head_dim is a multiple
            of 32, block_size of 16. 16 slots together are a tile, in it head after head, in 34 * head_dim bytes each:
            keys    16 * head_dim bytes; byte 4*t + j of chunk i of 64 is q + 128 of element 4*i + j of slot t,
                    and head_dim / 32 * 16 scales, those of the first 32 elements of all slots first
            values  [16, head_dim] int8, and scales in the same order as those of the keys. */
#ifndef SERVEKIT_H
#define SERVEKIT_H

#include <stddef.h>
#include <stdint.h>

#define SK_ABI 4
#define SK_PANEL 16
#define SK_GROUP 32
#define SK_KV_TILE 16
#define SK_Q4_GROUP_BYTES 320
#define SK_Q8_PAIR_BYTES 1088
#define SK_BF16_GROUP_BYTES 1024

#if defined(__GNUC__)
#define SK_API __attribute__((visibility("default")))
#else
#define SK_API
#endif

enum { SK_Q4 = 1, SK_Q8 = 2, SK_BF16 = 3 };                       /* formats of packed weights */
enum { SK_SRC_F32 = 0, SK_SRC_Q4_0 = 2, SK_SRC_Q4_1 = 3, SK_SRC_Q8_0 = 8, SK_SRC_Q4_K = 12 }; /* rows to pack from; ggml's numbers */
enum { SK_KV_F32 = 0, SK_KV_BF16 = 1, SK_KV_Q8_0 = 2 };           /* formats of keys and values */
enum { SK_SILU = 0, SK_GELU = 1, SK_GELU_TANH = 2, SK_RELU = 3 };

/* y = x W^T + bias. `bias` has n_padded floats or is NULL. k_padded is a multiple of 64, n_padded of 16. */
typedef struct {
  int32_t format;
  int32_t n, k;
  int32_t n_padded, k_padded;
  int32_t reserved;
  const uint8_t *packed; /* 64-byte aligned */
  const float *bias;
} sk_matrix;

/* What attention of one layer needs. window 0 and softcap 0 mean none; `causal` 0 lets tokens look both ways. */
typedef struct {
  int32_t heads, kv_heads, head_dim;
  int32_t window;
  float scale, softcap;
  int32_t causal;
  int32_t reserved;
} sk_attention;

/* One step: T tokens of S sequences, one sequence after the other; what engine/batch.py calls Batch. */
typedef struct {
  int32_t tokens, seqs;
  int32_t block_size, max_blocks;
  const int64_t *positions;    /* [T] */
  const int64_t *slot_mapping; /* [T]; NULL without a KV cache */
  const int64_t *block_tables; /* [S, max_blocks]; NULL without a KV cache */
  const int64_t *starts;       /* [S + 1] first token of each sequence in the step */
  const int64_t *context_lens; /* [S] keys visible to the last token, this step's included */
} sk_batch;

/* One decoder block. Norm weights are float32 [hidden]; qk_norm is [heads + kv_heads, head_dim] or NULL. */
typedef struct {
  const float *input_norm;
  const float *qk_norm;
  const float *post_attention_norm; /* NULL in families without it */
  const float *mlp_norm;
  const float *post_mlp_norm;
  const float *cos, *sin; /* [positions, head_dim / 2] */
  sk_attention attention;
  sk_matrix qkv, output;
  sk_matrix gate_up; /* panels alternate: 16 channels of gate, 16 of up, and so on */
  sk_matrix down;
  void *cache; /* keys and values in the decoder's kv_dtype */
} sk_layer;

typedef struct {
  int32_t num_layers, hidden, activation;
  int32_t kv_dtype;
  float eps;
  const sk_layer *layers;
  const float *final_norm;
} sk_decoder;

/* One encoder block. Norms have a weight and a bias (NULL: none). attention_norm is NULL in the first block of families
   that normalise before each part. */
typedef struct {
  const float *attention_norm, *attention_norm_bias;
  const float *mlp_norm, *mlp_norm_bias;
  const float *cos, *sin; /* NULL where positions are learned */
  sk_attention attention;
  sk_matrix qkv, output;
  sk_matrix up; /* gated: gate and up with panels alternating, as in sk_layer */
  sk_matrix down;
} sk_encoder_layer;

typedef struct {
  int32_t num_layers, hidden, activation;
  int32_t pre_norm, gated;
  float eps;
  const sk_encoder_layer *layers;
  const float *embedding_norm, *embedding_norm_bias;
  const float *final_norm, *final_norm_bias; /* NULL where the last block ends with a norm */
} sk_encoder;

/* How a token is chosen. temperature 0: the most likely, the first of equals. top_k 0, top_p 1 and min_p 0 keep all.
   `uniform` in [0, 1) decides the draw. */
typedef struct {
  double uniform;
  float temperature, top_p, min_p;
  int32_t top_k;
} sk_choice;

typedef struct sk_context sk_context; /* a thread pool, its scratch memory and the chosen kernels */

SK_API int sk_abi(void);
/* Name number `index` of the instruction sets that this build has and this CPU runs, best first; NULL behind the last. */
SK_API const char *sk_isa(int index);
/* NULL where `isa` (NULL: the best) is not among them or memory or threads cannot be had. */
SK_API sk_context *sk_open(const char *isa, int threads);
SK_API void sk_close(sk_context *context);

SK_API size_t sk_packed_bytes(int format, int n, int k);
/* Packs n rows of k inputs. Rows of quantised sources are ggml's blocks: Q4_0 and Q4_1 become SK_Q4 and Q8_0 becomes
   SK_Q8 without rounding, Q4_K becomes SK_Q4 with its scales rounded to float16, and four bits become SK_Q8 with
   rounding. Returns 0, or -1 where this source cannot become this format. */
SK_API int sk_pack(int format, int source, const void *rows, size_t row_bytes, int n, int k, uint8_t *packed);
/* float32 values [count, k] of the channels `rows` (each below n), as the kernels see them. */
SK_API void sk_unpack(const sk_matrix *matrix, const int64_t *rows, int count, float *out);

/* x [rows, k] float32 -> out [rows, n]. */
SK_API int sk_linear(sk_context *context, const sk_matrix *matrix, const float *x, int rows, float *out);
/* Keys and values [T, 2, kv_heads, head_dim] float32 of a step, keys already rotated, into a layer's cache. */
SK_API void sk_write_kv(sk_context *context, const sk_attention *attention, const sk_batch *batch, const float *kv,
                        int kv_dtype, void *cache);
/* Attention alone, for q [T, heads, head_dim] already rotated: out [T, heads, head_dim]. Without a cache, `kv`
   [T, 2, kv_heads, head_dim] holds the step's keys and values, and not in SK_KV_Q8_0. */
SK_API int sk_attend(sk_context *context, const sk_attention *attention, const sk_batch *batch, const float *q,
                     const void *kv, int kv_dtype, float *out);
/* x [T, hidden] is the scaled embedding and is overwritten; hidden states of all tokens, normalised -> out. */
SK_API int sk_forward(sk_context *context, const sk_decoder *decoder, const sk_batch *batch, float *x, float *out);
/* x [T, hidden]: the summed embeddings, before their norm; overwritten by the hidden states. The batch has no cache. */
SK_API int sk_encode(sk_context *context, const sk_encoder *encoder, const sk_batch *batch, float *x);
/* A token for each of `rows` rows of n scores. Returns 0, or -1 where there is no memory. */
SK_API int sk_choose(sk_context *context, const float *scores, int rows, int n, const sk_choice *choices, int64_t *out);

#endif
