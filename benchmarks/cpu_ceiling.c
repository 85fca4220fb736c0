/* What this machine can do at most: bytes read a second, and int8 multiply-adds a second, with all threads at once.

   Prints two numbers: GB/s of reading 256 MiB a thread, and billions of multiply-adds a second out of registers. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define BYTES ((size_t)256 << 20)
#define ROUNDS 9
#define PRODUCTS 2000000

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct {
  double (*measure)(void *memory);
  pthread_barrier_t *barrier;
  void *memory;
  double best;
} job;

static volatile uint64_t sink;

#if defined(__x86_64__)
__attribute__((target("avx2"))) static double read_all(void *memory) {
  const __m256i *p = memory;
  __m256i sum[8];
  for (int i = 0; i < 8; i++) sum[i] = _mm256_setzero_si256();
  double began = now();
  for (size_t at = 0; at < BYTES / 32; at += 8)
    for (int i = 0; i < 8; i++) sum[i] = _mm256_add_epi64(sum[i], _mm256_load_si256(p + at + i));
  double took = now() - began;
  for (int i = 1; i < 8; i++) sum[0] = _mm256_add_epi64(sum[0], sum[i]);
  sink += (uint64_t)_mm256_extract_epi64(sum[0], 0);
  return (double)BYTES / took / 1e9;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static double multiply_vnni(void *memory) {
  (void)memory;
  __m512i sum[12], w = _mm512_set1_epi8(3);
  for (int i = 0; i < 12; i++) sum[i] = _mm512_setzero_si512();
  double began = now();
  for (int n = 0; n < PRODUCTS; n++) {
    _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], w, w);
    __asm__ volatile("" : "+v"(w));
  }
  double took = now() - began;
  for (int i = 1; i < 12; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
  sink += (uint64_t)_mm512_reduce_add_epi32(sum[0]);
  return PRODUCTS * 12.0 * 64.0 / took / 1e9;
}

__attribute__((target("avx2"))) static double multiply_avx2(void *memory) {
  (void)memory;
  __m256i sum[12], w = _mm256_set1_epi8(3);
  for (int i = 0; i < 12; i++) sum[i] = _mm256_setzero_si256();
  double began = now();
  for (int n = 0; n < PRODUCTS; n++) {
    _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(w, w));
    __asm__ volatile("" : "+x"(w));
  }
  double took = now() - began;
  for (int i = 1; i < 12; i++) sum[0] = _mm256_add_epi16(sum[0], sum[i]);
  sink += (uint64_t)_mm256_extract_epi64(sum[0], 0);
  return PRODUCTS * 12.0 * 32.0 / took / 1e9;
}

static double multiply(void *memory) {
  return __builtin_cpu_supports("avx512vnni") ? multiply_vnni(memory) : multiply_avx2(memory);
}
#elif defined(__aarch64__)
static double read_all(void *memory) {
  const uint8_t *p = memory;
  uint64x2_t sum[8];
  for (int i = 0; i < 8; i++) sum[i] = vdupq_n_u64(0);
  double began = now();
  for (size_t at = 0; at < BYTES; at += 128)
    for (int i = 0; i < 8; i++) sum[i] = vaddq_u64(sum[i], vreinterpretq_u64_u8(vld1q_u8(p + at + 16 * i)));
  double took = now() - began;
  for (int i = 1; i < 8; i++) sum[0] = vaddq_u64(sum[0], sum[i]);
  sink += vgetq_lane_u64(sum[0], 0);
  return (double)BYTES / took / 1e9;
}

static double multiply(void *memory) {
  (void)memory;
  int8x16_t w = vdupq_n_s8(3);
  int32x4_t sum[12];
  for (int i = 0; i < 12; i++) sum[i] = vdupq_n_s32(0);
  double began = now();
  for (int n = 0; n < PRODUCTS; n++) {
    for (int i = 0; i < 12; i++) sum[i] = vdotq_s32(sum[i], w, w);
    __asm__ volatile("" : "+w"(w));
  }
  double took = now() - began;
  for (int i = 1; i < 12; i++) sum[0] = vaddq_s32(sum[0], sum[i]);
  sink += (uint64_t)vgetq_lane_s32(sum[0], 0);
  return PRODUCTS * 12.0 * 16.0 / took / 1e9;
}
#endif

static void *run(void *argument) {
  job *j = argument;
  for (int round = 0; round < ROUNDS; round++) {
    pthread_barrier_wait(j->barrier);
    double rate = j->measure(j->memory);
    j->best = rate > j->best ? rate : j->best;
  }
  return NULL;
}

/* The sum over threads of each one's best round, all running at once. */
static double all_threads(double (*measure)(void *), int threads) {
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, NULL, (unsigned)threads);
  pthread_t ids[threads];
  job jobs[threads];
  for (int i = 0; i < threads; i++) {
    jobs[i] = (job){measure, &barrier, aligned_alloc(64, BYTES), 0};
    if (!jobs[i].memory) exit(1);
    memset(jobs[i].memory, i + 1, BYTES);
    pthread_create(&ids[i], NULL, run, &jobs[i]);
  }
  double total = 0;
  for (int i = 0; i < threads; i++) {
    pthread_join(ids[i], NULL);
    total += jobs[i].best;
    free(jobs[i].memory);
  }
  return total;
}

int main(int count, char **values) {
  int threads = count > 1 ? atoi(values[1]) : 1;
  printf("%.2f %.1f\n", all_threads(read_all, threads), all_threads(multiply, threads));
  return 0;
}
