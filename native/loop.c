/* The I/O threads. Each waits (wait.c) for its own connections and for a wakeup, by which other threads ask it to take
 * its attention list (connections to wake, unpark or close). The first thread also checks for stalled attempts and
 * broken paths, and trims idle memory.
 *
 * Reports are edges: connection->readable and ->writable keep the waiter's last report until a system call contradicts
 * it. Connections with work to do are in thread->run and take turns; one turn receives and sends at most one frame. */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>

#include "attempt.h"
#include "engine.h"
#include "link.h"
#include "message.h"
#include "pace.h"
#include "sock.h"

static _Thread_local zp__thread *current;

void zp__thread_wake(zp__thread *thread)
{
	if (thread == current || thread->woken)
		return; /* It takes the attention list before it waits. */
	thread->woken = true;
	zp__wakeup_signal(thread->waiter.wakeup.write_fd);
}

void zp__connection_attend(zp__connection *c)
{
	if (c->fd < 0)
		return;
	zp__list_remove(&c->idle_node);
	if (zp__list_empty(&c->attention_node))
		zp__list_append(&c->thread->attention, &c->attention_node);
	zp__thread_wake(c->thread);
}

static void run_soon(zp__thread *thread, zp__connection *c)
{
	if (zp__list_empty(&c->run_node))
		zp__list_append(&thread->run, &c->run_node);
}

void zp__connection_ready(zp__connection *c, bool readable, bool writable, bool hung_up)
{
	c->hung_up |= hung_up;
	c->readable |= readable || hung_up;
	c->writable |= writable || (readable && c->shm); /* A byte on the socket may mean either. */
	run_soon(c->thread, c);
}

/* Lock held. */
static void watch(zp__thread *thread, zp__connection *c)
{
	int rc = zp__waiter_add(&thread->waiter, c);
	c->watched = rc == 0;
	if (rc < 0)
		zp__connection_lose(c, rc);
	else if (c->shm) /* Other connections: the waiter reports that they are writable. */
		zp__connection_ready(c, false, true, false);
}

/* Handles the attention list, and takes thread->checks. False: the thread must end. */
static bool look(zp__thread *thread, bool *check)
{
	zp_engine *engine = thread->engine;
	pthread_mutex_lock(&engine->mutex);
	thread->woken = false;
	*check |= thread->checks;
	thread->checks = false;
	while (!zp__list_empty(&thread->attention)) {
		zp__connection *c = ZP__ELEMENT(thread->attention.next, zp__connection, attention_node);
		zp__list_remove(&c->attention_node);
		if (c->closing)
			zp__connection_close(c); /* May free `c`. */
		else if (!c->watched)
			watch(thread, c);
		else
			run_soon(thread, c);
	}
	bool go_on = !engine->stopping;
	pthread_mutex_unlock(&engine->mutex);
	return go_on;
}

static int timeout_ms(uint64_t deadline_ns, uint64_t now_ns)
{
	if (deadline_ns == UINT64_MAX)
		return -1;
	uint64_t ms = deadline_ns > now_ns ? (deadline_ns - now_ns + 999999) / 1000000 : 0;
	return ms > INT_MAX ? INT_MAX : (int)ms;
}

/* One turn of one connection; it stays in the run list while there may be more to do. */
static void run_one(zp__thread *thread, zp__connection *c)
{
	zp__list_remove(&c->run_node);
	int received = zp__receive_turn(c);
	int sent = received < 0 ? 0 : zp__send_turn(c);
	int error = received < 0 ? received : sent;
	if (error < 0) {
		zp_engine *engine = thread->engine;
		pthread_mutex_lock(&engine->mutex);
		if (error == -EPROTO) /* A peer that violates the protocol would do so on every connection. */
			zp__link_lose(c->link, error, true);
		else
			zp__connection_lose(c, error);
		pthread_mutex_unlock(&engine->mutex);
	} else if (received > 0 || sent > 0) {
		run_soon(thread, c);
	}
}

static void run_all(zp__thread *thread)
{
	/* One round: connections that are appended during it run in the next one. */
	zp__list round;
	zp__list_init(&round);
	while (!zp__list_empty(&thread->run)) {
		zp__list *node = thread->run.next;
		zp__list_remove(node);
		zp__list_append(&round, node);
	}
	while (!zp__list_empty(&round))
		run_one(thread, ZP__ELEMENT(round.next, zp__connection, run_node));
}

static void *thread_main(void *argument)
{
	zp__thread *thread = argument;
	zp_engine *engine = thread->engine;
	current = thread;
	/* The thread inherits the floating-point environment. If it flushed subnormals to zero, peers would disagree. */
	fesetenv(FE_DFL_ENV);
	uint64_t deadline_ns = UINT64_MAX;
	bool check = true;
	while (look(thread, &check)) {
		uint64_t now_ns = 0;
		if (thread->index == 0) {
			now_ns = zp__now_ns();
			if (check || now_ns >= deadline_ns) {
				pthread_mutex_lock(&engine->mutex);
				uint64_t links_ns = zp__links_check(engine, now_ns);
				deadline_ns = zp__attempts_check(engine, now_ns);
				deadline_ns = links_ns < deadline_ns ? links_ns : deadline_ns;
				uint64_t paces_ns = zp__paces_check(engine, now_ns);
				deadline_ns = paces_ns < deadline_ns ? paces_ns : deadline_ns;
				uint64_t buffers_ns = zp__buffers_trim(engine, now_ns);
				deadline_ns = buffers_ns < deadline_ns ? buffers_ns : deadline_ns;
				bool attention = !zp__list_empty(&thread->attention);
				pthread_mutex_unlock(&engine->mutex);
				uint64_t pool_ns = zp__pool_trim(engine, now_ns);
				deadline_ns = pool_ns < deadline_ns ? pool_ns : deadline_ns;
				check = false;
				if (attention)
					continue;
			}
		}
		bool busy = !zp__list_empty(&thread->run);
		check |= zp__waiter_wait(&thread->waiter, busy ? 0 : timeout_ms(deadline_ns, now_ns));
		run_all(thread);
	}
	return NULL;
}

/* On failure the caller releases what was created; it is in `thread`. */
int zp__thread_start(zp__thread *thread, zp_engine *engine, uint32_t index)
{
	thread->engine = engine;
	thread->index = index;
	zp__list_init(&thread->run);
	zp__list_init(&thread->attention);
	int rc = zp__waiter_open(&thread->waiter);
	if (rc < 0)
		return rc;
	thread->scratch = malloc(ZP__SCRATCH_BYTES);
	if (!thread->scratch)
		return -ENOMEM;
	sigset_t all, before;
	sigfillset(&all); /* The program's own threads handle signals. */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&thread->pthread, NULL, thread_main, thread);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	thread->started = rc == 0;
	return rc;
}
