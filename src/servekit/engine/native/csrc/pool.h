/* A pool of threads that compute one phase after another. */
#ifndef SK_POOL_H
#define SK_POOL_H

typedef struct sk_pool sk_pool;

/* Computes chunk number `chunk` of a phase; `thread` is below the pool's number of threads. */
typedef void (*sk_task)(void *job, int chunk, int thread);

/* `threads` counts the calling one. NULL where memory or threads cannot be had. */
sk_pool *sk_pool_open(int threads);
void sk_pool_close(sk_pool *pool);
int sk_pool_threads(const sk_pool *pool);

/* Runs task(job, 0..chunks - 1) on all threads and returns when every chunk is done. chunks is below 65536. Only one
   thread may call it at a time. */
void sk_pool_run(sk_pool *pool, sk_task task, void *job, int chunks);

#endif
