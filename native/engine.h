/* The engine and its threads; see engine.c and loop.c.
 *
 * Locking. There is one mutex, engine->mutex ("the lock"). It protects every field of every structure of the engine's
 * headers that is not marked as constant, as owned by one thread or as under stop_mutex, which only zp_engine_stop()
 * takes. The lock is held for bookkeeping only: recv, send, checksums, reduce, quantise and restore run without it, on
 * memory that is pinned (attempt.h). No other lock is taken while the lock is held. Functions marked "lock held" expect
 * the lock and leave it held. */
#ifndef ZP_ENGINE_H
#define ZP_ENGINE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "bounds.h"
#include "event.h"
#include "list.h"
#include "memory.h"
#include "wait.h"
#include "zp_api.h"

typedef struct zp__thread zp__thread;

struct zp__thread {
	zp_engine *engine;
	pthread_t pthread;
	uint32_t index;
	bool started;
	zp__waiter waiter;
	zp__list run;	    /* connections with something to do; owned by the thread */
	zp__list attention; /* under the lock */
	bool checks;	    /* the first thread must look at its deadlines again; under the lock */
	bool woken;	    /* the wakeup was signalled since the thread last took the attention list; under the lock */
	uint8_t *scratch;   /* ZP__SCRATCH_BYTES, for bodies that are dropped; owned by the thread */
};

struct zp_engine {
	zp_engine_config config; /* constant */
	zp__queue queue;
	zp__wakeup wakeup; /* of `queue` */
	uint32_t thread_count;
	pthread_mutex_t mutex;
	pthread_cond_t unpinned; /* an ending attempt has no pins left, or is gone */
	bool stopping;		 /* threads must end, and nothing may be added to what zp_engine_stop() discards */
	pthread_mutex_t stop_mutex; /* held by zp_engine_stop(); taken before the lock */
	bool stopped;		    /* the threads have ended, all is discarded; under stop_mutex */
	bool forked;		    /* this process is a child of the engine's; constant there */
	uint64_t attempt_max, channel_max;		/* the greatest ids learnt; free channels do not count */
	uint64_t attempts_learnt[ZP__ID_WINDOW / 64]; /* bits by id modulo ZP__ID_WINDOW, down from attempt_max */
	uint64_t link_id_last;
	uint64_t links_check_ns; /* time of the next zp__links_check() */
	uint64_t resume_ns;	 /* the least of all links; UINT64_MAX: none */
	zp__list links, channels, parked, messages;
	zp__list early[ZP__EARLY_BUCKETS]; /* those of `messages` that are frames of attempts not begun yet, by id */
	zp__list attempts[ZP__ATTEMPT_BUCKETS];
	bool stalls_held; /* zp_stalls_hold() */
	zp__list buffers;
	uint32_t buffer_count;	 /* in `buffers` */
	uint64_t messages_bytes; /* charged for messages of all links that are being received, or not released */
	uint32_t link_count;	 /* in `links` */
	zp__pool pool;
	zp__list registry_node;	 /* in the process's list of engines */
	zp__thread threads[];
};

/* engine.c */
void zp__attempt_learn(zp_engine *engine, uint64_t id);			  /* lock held */
bool zp__attempt_is_known(const zp_engine *engine, uint64_t id);	  /* lock held */
void zp__channel_learn(zp_engine *engine, uint64_t id);			  /* lock held */
bool zp__channel_is_known(const zp_engine *engine, uint64_t id);	  /* lock held */

/* loop.c */
int zp__thread_start(zp__thread *thread, zp_engine *engine, uint32_t index);
void zp__thread_wake(zp__thread *thread);			/* lock held */
void zp__connection_attend(zp__connection *connection);		/* lock held */
void zp__connection_ready(zp__connection *connection, bool readable, bool writable, bool hung_up);

static inline uint64_t zp__stall_timeout_ns(const zp_engine *engine)
{
	return engine->config.stall_timeout_ms * (uint64_t)1000000;
}

#endif
