/* Many short phases on a pool, for the thread sanitizer: every chunk runs once, and a phase sees all of the one before.

   stress [phases]. Nothing here is atomic on purpose: the pool alone must order it. */
#include "pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MOST_CHUNKS 64

typedef struct {
  long phase;
  int chunks, threads;
  long done[MOST_CHUNKS]; /* the phase in which a chunk ran last */
  long sum[MOST_CHUNKS];
  int is_wrong[MOST_CHUNKS];
} work;

static void run(void *job, int chunk, int thread) {
  work *w = job;
  /* Reads what another thread wrote in the phase before. */
  const int other = (chunk + 7) % MOST_CHUNKS;
  if (w->done[chunk] == w->phase || thread < 0 || thread >= w->threads || chunk >= w->chunks) w->is_wrong[chunk] = 1;
  w->done[chunk] = w->phase;
  w->sum[chunk] += other >= w->chunks ? w->done[other] : 1;
}

static int stress(int threads, long phases) {
  sk_pool *pool = sk_pool_open(threads);
  if (!pool || sk_pool_threads(pool) != threads) return -1;
  static work w;
  w = (work){.threads = threads};
  for (w.phase = 1; w.phase <= phases; w.phase++) {
    w.chunks = w.phase % 5 == 0 ? (int)(w.phase % MOST_CHUNKS) : 1 + (int)(w.phase % 3);
    sk_pool_run(pool, run, &w, w.chunks);
    for (int i = 0; i < w.chunks; i++)
      if (w.done[i] != w.phase || w.is_wrong[i]) return -1;
    /* Long enough for everybody to fall asleep. */
    if (w.phase % 500 == 0) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
  }
  sk_pool_close(pool);
  return 0;
}

int main(int count, char **arguments) {
  const long phases = count > 1 ? atol(arguments[1]) : 5000;
  for (int threads = 1; threads <= 5; threads++)
    if (stress(threads, phases) != 0) {
      fprintf(stderr, "%d threads: a chunk was left out, or ran twice\n", threads);
      return 1;
    }
  /* Opened and closed without any work. */
  for (int i = 0; i < 50; i++) sk_pool_close(sk_pool_open(4));
  printf("%ld phases passed\n", phases);
  return 0;
}
