/* A decode step of a small model is a few milliseconds and some 200 phases. So threads wait for the next phase by
   spinning, which costs well under a microsecond, but never for long: a pool that spins on takes the core from the very
   thread it waits for as soon as another process runs.

   Two rules keep a busy machine from stalling it. A phase is over when its chunks are done, not when all threads have
   arrived: one that was put aside by the system, or sleeps, is not waited for unless it holds a chunk. And whoever has
   waited for SK_SPINS turns sleeps, which frees its core for the thread that does hold one.

   Between cores the dear thing is a line of memory that changes hands. Each thread has a share of the chunks and takes
   them from a counter of its own; only when that is empty does it look at the others'. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* About 30 microseconds: longer than what lies between two phases of a step, shorter than what lies between steps. */
#define SK_SPINS 2000
#define SK_LINE 64

/* How many chunks of its share have been taken, in the lower 16 bits, and in which phase. A counter that has an older
   phase has not been touched in this one. */
typedef struct {
  _Alignas(SK_LINE) _Atomic uint64_t taken;
} share;

/* What a phase is. It is written before `number`, which is odd while it is being written. */
typedef struct {
  _Alignas(SK_LINE) _Atomic uint64_t number;
  atomic_int chunks;
  _Atomic(sk_task) task;
  _Atomic(void *) job;
} phase;

struct sk_pool {
  phase now;
  _Alignas(SK_LINE) atomic_int done;
  _Alignas(SK_LINE) atomic_int sleepers; /* workers that have to be woken for a phase */
  atomic_int caller_sleeps;
  atomic_int stop;
  int threads;
  pthread_mutex_t lock;
  pthread_cond_t phase_began, phase_ended;
  pthread_t *workers;
  share *shares;
};

typedef struct {
  sk_pool *pool;
  int thread;
} worker_argument;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* A phase as one thread has seen it, all of it at the same moment. */
typedef struct {
  uint64_t number;
  int chunks;
  sk_task task;
  void *job;
} view;

static int look(sk_pool *pool, view *seen) {
  seen->number = atomic_load_explicit(&pool->now.number, memory_order_acquire);
  seen->chunks = atomic_load_explicit(&pool->now.chunks, memory_order_acquire);
  seen->task = atomic_load_explicit(&pool->now.task, memory_order_acquire);
  seen->job = atomic_load_explicit(&pool->now.job, memory_order_acquire);
  return seen->number % 2 == 0 && atomic_load_explicit(&pool->now.number, memory_order_relaxed) == seen->number;
}

/* The next chunk of one thread's share, or -1 where none is left. Whoever comes too late finds a counter of his phase
   that is used up, or one of a later phase. */
static int take(sk_pool *pool, const view *seen, int owner) {
  const int first = (int)((int64_t)seen->chunks * owner / pool->threads);
  const int last = (int)((int64_t)seen->chunks * (owner + 1) / pool->threads);
  _Atomic uint64_t *counter = &pool->shares[owner].taken;
  uint64_t value = atomic_load_explicit(counter, memory_order_acquire);
  for (;;) {
    if (value >> 16 > seen->number) return -1;
    const int taken = value >> 16 == seen->number ? (int)(value & 0xffff) : 0;
    if (first + taken >= last) return -1;
    const uint64_t next = seen->number << 16 | (uint64_t)(taken + 1);
    if (atomic_compare_exchange_weak_explicit(counter, &value, next, memory_order_acq_rel, memory_order_acquire))
      return first + taken;
  }
}

/* Computes what it can get, its own share first. Returns how many chunks that were. */
static int work(sk_pool *pool, const view *seen, int thread) {
  int count = 0;
  for (int i = 0; i < pool->threads; i++) {
    const int owner = (thread + i) % pool->threads;
    for (int chunk; (chunk = take(pool, seen, owner)) >= 0; count++) seen->task(seen->job, chunk, thread);
  }
  return count;
}

/* Only chunks of the phase that the caller is waiting for can be reported: it cannot end before. */
static void report(sk_pool *pool, int count) {
  if (count == 0) return;
  atomic_fetch_add(&pool->done, count);
  if (!atomic_load(&pool->caller_sleeps)) return;
  pthread_mutex_lock(&pool->lock);
  pthread_cond_signal(&pool->phase_ended);
  pthread_mutex_unlock(&pool->lock);
}

static void sleep_until_phase(sk_pool *pool, uint64_t last) {
  pthread_mutex_lock(&pool->lock);
  atomic_fetch_add(&pool->sleepers, 1);
  while (atomic_load(&pool->now.number) == last && !atomic_load(&pool->stop))
    pthread_cond_wait(&pool->phase_began, &pool->lock);
  atomic_fetch_sub(&pool->sleepers, 1);
  pthread_mutex_unlock(&pool->lock);
}

static void *worker(void *argument) {
  sk_pool *pool = ((worker_argument *)argument)->pool;
  const int thread = ((worker_argument *)argument)->thread;
  free(argument);
  uint64_t last = 0;
  while (!atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
    int spins = 0;
    while (atomic_load_explicit(&pool->now.number, memory_order_relaxed) == last && spins++ < SK_SPINS) relax();
    if (spins > SK_SPINS) sleep_until_phase(pool, last);
    view seen;
    if (!look(pool, &seen) || seen.number == last) continue;
    last = seen.number;
    report(pool, work(pool, &seen, thread));
  }
  return NULL;
}

static void wait_until_done(sk_pool *pool, int chunks) {
  for (int spins = 0; spins < SK_SPINS; spins++) {
    if (atomic_load_explicit(&pool->done, memory_order_acquire) == chunks) return;
    relax();
  }
  pthread_mutex_lock(&pool->lock);
  atomic_store(&pool->caller_sleeps, 1);
  while (atomic_load(&pool->done) != chunks) pthread_cond_wait(&pool->phase_ended, &pool->lock);
  atomic_store(&pool->caller_sleeps, 0);
  pthread_mutex_unlock(&pool->lock);
}

static void begin(sk_pool *pool, const view *next) {
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->now.number, next->number - 1, memory_order_relaxed);
  atomic_store_explicit(&pool->now.chunks, next->chunks, memory_order_release);
  atomic_store_explicit(&pool->now.task, next->task, memory_order_release);
  atomic_store_explicit(&pool->now.job, next->job, memory_order_release);
  atomic_store(&pool->now.number, next->number);
  if (!atomic_load(&pool->sleepers)) return;
  pthread_mutex_lock(&pool->lock);
  pthread_cond_broadcast(&pool->phase_began);
  pthread_mutex_unlock(&pool->lock);
}

void sk_pool_run(sk_pool *pool, sk_task task, void *job, int chunks) {
  if (pool->threads == 1 || chunks <= 1) {
    for (int chunk = 0; chunk < chunks; chunk++) task(job, chunk, 0);
    return;
  }
  const view next = {atomic_load_explicit(&pool->now.number, memory_order_relaxed) + 2, chunks, task, job};
  begin(pool, &next);
  const int left = chunks - work(pool, &next, 0);
  if (left > 0) wait_until_done(pool, left);
}

int sk_pool_threads(const sk_pool *pool) { return pool->threads; }

static int start_worker(sk_pool *pool, int thread) {
  worker_argument *argument = malloc(sizeof *argument);
  if (!argument) return -1;
  *argument = (worker_argument){pool, thread};
  if (pthread_create(&pool->workers[thread - 1], NULL, worker, argument) == 0) return 0;
  free(argument);
  return -1;
}

sk_pool *sk_pool_open(int threads) {
  if (threads < 1) return NULL;
  sk_pool *pool = aligned_alloc(SK_LINE, sizeof *pool);
  if (!pool) return NULL;
  *pool = (sk_pool){.threads = 1};
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->phase_began, NULL);
  pthread_cond_init(&pool->phase_ended, NULL);
  pool->workers = calloc((size_t)threads, sizeof *pool->workers);
  pool->shares = aligned_alloc(SK_LINE, (size_t)threads * sizeof *pool->shares);
  int started = 1;
  if (pool->workers && pool->shares) {
    for (int i = 0; i < threads; i++) atomic_init(&pool->shares[i].taken, 0);
    pool->threads = threads; /* before any worker looks at it */
    while (started < threads && start_worker(pool, started) == 0) started++;
  }
  pool->threads = started;
  if (started == threads) return pool;
  sk_pool_close(pool);
  return NULL;
}

void sk_pool_close(sk_pool *pool) {
  if (!pool) return;
  pthread_mutex_lock(&pool->lock);
  atomic_store(&pool->stop, 1);
  pthread_cond_broadcast(&pool->phase_began);
  pthread_mutex_unlock(&pool->lock);
  for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->workers[thread - 1], NULL);
  pthread_cond_destroy(&pool->phase_began);
  pthread_cond_destroy(&pool->phase_ended);
  pthread_mutex_destroy(&pool->lock);
  free(pool->workers);
  free(pool->shares);
  free(pool);
}
