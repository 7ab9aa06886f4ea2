/* The engine: opening, stopping, closing, the queue of events, and fork().
 *
 * Stopping ends all that touches sockets and the caller's memory. It waits for the I/O threads, and for attempts that
 * other threads are ending or feeding, but not for other calls: these find `stopping` set under the lock, or find
 * nothing. What they may still use is freed when the engine is closed: the lock, wakeups, events, messages, the pool.
 *
 * A forked child has the engine's memory but not its threads. The child closes its copies of the file descriptors at
 * once, so that it does not keep connections open after the parent has died. In the child the engine is unusable, and no
 * function may be called with it but zp_engine_close(), which frees nothing: other threads may have been halfway. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attempt.h"
#include "digest.h"
#include "early.h"
#include "engine.h"
#include "message.h"
#include "reduce.h"

/* All engines of the process. registry_mutex is taken before engine->mutex, never after it. */
static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static zp__list registry = {&registry, &registry};
static bool fork_handled;

static void fork_prepare(void)
{
	pthread_mutex_lock(&registry_mutex);
	ZP__EACH(node, &registry)
	pthread_mutex_lock(&ZP__ELEMENT(node, zp_engine, registry_node)->mutex);
}

static void fork_parent(void)
{
	ZP__EACH(node, &registry)
	pthread_mutex_unlock(&ZP__ELEMENT(node, zp_engine, registry_node)->mutex);
	pthread_mutex_unlock(&registry_mutex);
}

static void fork_child(void)
{
	ZP__EACH(node, &registry)
	{
		zp_engine *engine = ZP__ELEMENT(node, zp_engine, registry_node);
		engine->forked = true;
		ZP__EACH(link_node, &engine->links)
		{
			zp__link *link = ZP__ELEMENT(link_node, zp__link, node);
			for (uint32_t i = 0; i < link->connection_count; i++)
				if (link->connections[i].fd >= 0)
					close(link->connections[i].fd);
		}
		for (uint32_t i = 0; i < engine->thread_count; i++)
			zp__waiter_close(&engine->threads[i].waiter);
		ZP__EACH(channel_node, &engine->channels)
		{
			const zp__channel *channel = ZP__ELEMENT(channel_node, zp__channel, node);
			if (channel->own.fd >= 0)
				close(channel->own.fd);
		}
		zp__wakeup_close(&engine->wakeup);
		zp__list_remove(&engine->registry_node);
		pthread_mutex_unlock(&engine->mutex);
	}
	pthread_mutex_unlock(&registry_mutex);
}

/* Adds the engine to the registry, which the fork handlers walk. */
static int engine_register(zp_engine *engine)
{
	int rc = 0;
	pthread_mutex_lock(&registry_mutex);
	if (!fork_handled)
		rc = -pthread_atfork(fork_prepare, fork_parent, fork_child);
	if (rc == 0) {
		fork_handled = true;
		zp__list_append(&registry, &engine->registry_node);
	}
	pthread_mutex_unlock(&registry_mutex);
	return rc;
}

static int config_check(const zp_engine_config *config)
{
	if (config->thread_count < 1 || config->thread_count > ZP__THREADS_MAX || config->stall_timeout_ms < 1)
		return -EINVAL;
	if (config->message_bytes_max > UINT32_MAX || config->messages_queued_bytes_max < config->message_bytes_max)
		return -EINVAL;
	return 0;
}

static int engine_new(const zp_engine_config *config, zp_engine **result)
{
	zp_engine *engine = calloc(1, sizeof *engine + config->thread_count * sizeof *engine->threads);
	if (!engine)
		return -ENOMEM;
	engine->config = *config;
	engine->resume_ns = UINT64_MAX;
	zp__list_init(&engine->links);
	zp__list_init(&engine->channels);
	zp__list_init(&engine->parked);
	zp__list_init(&engine->queue.events);
	zp__list_init(&engine->queue.messages);
	zp__list_init(&engine->messages);
	zp__list_init(&engine->buffers);
	zp__list_init(&engine->registry_node);
	for (uint32_t i = 0; i < ZP__ATTEMPT_BUCKETS; i++)
		zp__list_init(&engine->attempts[i]);
	for (uint32_t i = 0; i < ZP__EARLY_BUCKETS; i++)
		zp__list_init(&engine->early[i]);
	pthread_mutex_init(&engine->mutex, NULL);
	pthread_mutex_init(&engine->stop_mutex, NULL);
	pthread_cond_init(&engine->unpinned, NULL);
	int rc = zp__wakeup_open(&engine->wakeup);
	engine->queue.fd = engine->wakeup.write_fd;
	*result = engine;
	return rc;
}

int zp_engine_open(const zp_engine_config *config, zp_engine **result)
{
	*result = NULL;
	int rc = config_check(config);
	if (rc < 0)
		return rc;
	zp_engine *engine = NULL;
	rc = engine_new(config, &engine);
	for (uint32_t i = 0; rc == 0 && i < config->thread_count; i++) {
		engine->thread_count = i + 1;
		rc = zp__thread_start(&engine->threads[i], engine, i);
	}
	if (rc == 0)
		rc = engine_register(engine);
	if (rc < 0) {
		zp_engine_close(engine);
		return rc;
	}
	*result = engine;
	return 0;
}

static void threads_stop(zp_engine *engine)
{
	pthread_mutex_lock(&engine->mutex);
	engine->stopping = true;
	for (uint32_t i = 0; i < engine->thread_count; i++)
		if (engine->threads[i].started)
			zp__thread_wake(&engine->threads[i]);
	pthread_mutex_unlock(&engine->mutex);
	for (uint32_t i = 0; i < engine->thread_count; i++)
		if (engine->threads[i].started)
			pthread_join(engine->threads[i].pthread, NULL);
}

/* Closes all links; the threads have ended. */
static void links_discard(zp_engine *engine)
{
	pthread_mutex_lock(&engine->mutex);
	while (!zp__list_empty(&engine->links))
		zp__link_lose(ZP__ELEMENT(engine->links.next, zp__link, node), -ESHUTDOWN, false);
	for (uint32_t i = 0; i < engine->thread_count; i++) {
		zp__list *attention = &engine->threads[i].attention;
		while (engine->threads[i].started && !zp__list_empty(attention)) {
			zp__connection *c = ZP__ELEMENT(attention->next, zp__connection, attention_node);
			zp__list_remove(&c->attention_node);
			if (c->closing)
				zp__connection_close(c);
		}
	}
	pthread_mutex_unlock(&engine->mutex);
}

/* Lock held, or the engine is being freed. Takes an event out of the queue. */
static void event_take(zp_engine *engine, zp__event *event)
{
	zp__event_withdraw(engine, event);
	if (event->event.kind == ZP_EVENT_LINK_LOST)
		zp__link_release(ZP__ELEMENT(event, zp__link, event));
	else if (event->event.kind == ZP_EVENT_CONNECTION_LOST)
		zp__link_release(ZP__ELEMENT(event, zp__connection, retransmit.event)->link);
}

static void engine_free(zp_engine *engine)
{
	zp__event *event;
	while (!zp__list_empty(&engine->channels))
		zp_channel_close(engine, ZP__ELEMENT(engine->channels.next, zp__channel, node)->id);
	while ((event = zp__event_next(&engine->queue)))
		event_take(engine, event);
	while (!zp__list_empty(&engine->messages)) /* Messages that were polled and never released. */
		zp__message_forget(engine, ZP__ELEMENT(engine->messages.next, zp__message_in, node));
	zp__buffers_trim(engine, UINT64_MAX);
	zp__pool_discard(engine);
	for (uint32_t i = 0; i < engine->thread_count; i++) {
		free(engine->threads[i].scratch);
		zp__waiter_close(&engine->threads[i].waiter);
	}
	zp__wakeup_close(&engine->wakeup);
	pthread_cond_destroy(&engine->unpinned);
	pthread_mutex_destroy(&engine->stop_mutex);
	pthread_mutex_destroy(&engine->mutex);
	free(engine);
}

void zp_engine_stop(zp_engine *engine)
{
	if (!engine)
		return;
	pthread_mutex_lock(&engine->stop_mutex); /* Whoever comes second waits here. */
	if (!engine->stopped) {
		threads_stop(engine);
		links_discard(engine);
		zp__attempts_discard(engine);
		engine->stopped = true;
	}
	pthread_mutex_unlock(&engine->stop_mutex);
}

void zp_engine_close(zp_engine *engine)
{
	if (!engine || engine->forked)
		return;
	zp_engine_stop(engine);
	pthread_mutex_lock(&registry_mutex);
	zp__list_remove(&engine->registry_node);
	pthread_mutex_unlock(&registry_mutex);
	engine_free(engine);
}

void zp_engine_release(zp_engine **engine)
{
	zp_engine_close(*engine);
}

int zp_engine_fd(zp_engine *engine)
{
	return engine->wakeup.read_fd;
}

/* The next event to poll, or NULL. */
zp__event *zp__event_next(const zp__queue *queue)
{
	const zp__list *list = zp__list_empty(&queue->events) ? &queue->messages : &queue->events;
	return zp__list_empty(list) ? NULL : ZP__ELEMENT(list->next, zp__event, node);
}

void zp__event_push(zp__queue *queue, zp__event *event)
{
	if (!zp__event_next(queue))
		zp__wakeup_signal(queue->fd);
	zp__list_append(event->event.kind == ZP_EVENT_MESSAGE ? &queue->messages : &queue->events, &event->node);
}

void zp__event_withdraw(zp_engine *engine, zp__event *event)
{
	if (zp__list_empty(&event->node))
		return;
	zp__list_remove(&event->node);
	if (!zp__event_next(&engine->queue))
		zp__wakeup_drain(engine->wakeup.read_fd);
}

int zp_engine_poll(zp_engine *engine, zp_event *result)
{
	pthread_mutex_lock(&engine->mutex);
	zp__event *event = engine->stopping ? NULL : zp__event_next(&engine->queue);
	if (event) {
		*result = event->event;
		event_take(engine, event);
	}
	pthread_mutex_unlock(&engine->mutex);
	return event != NULL;
}

static uint64_t *word_of(zp_engine *engine, uint64_t id)
{
	return &engine->attempts_learnt[id % ZP__ID_WINDOW / 64];
}

bool zp__attempt_is_known(const zp_engine *engine, uint64_t id)
{
	if (id > engine->attempt_max)
		return false;
	uint64_t word = engine->attempts_learnt[id % ZP__ID_WINDOW / 64];
	return engine->attempt_max - id >= ZP__ID_WINDOW || word >> id % 64 & 1;
}

void zp__attempt_learn(zp_engine *engine, uint64_t id)
{
	uint64_t before = engine->attempt_max;
	if (id > engine->attempt_max && id - engine->attempt_max >= ZP__ID_WINDOW)
		memset(engine->attempts_learnt, 0, sizeof engine->attempts_learnt);
	else
		for (uint64_t between = engine->attempt_max + 1; between < id; between++)
			*word_of(engine, between) &= ~((uint64_t)1 << between % 64);
	if (id > engine->attempt_max)
		engine->attempt_max = id;
	if (engine->attempt_max - id < ZP__ID_WINDOW)
		*word_of(engine, id) |= (uint64_t)1 << id % 64;
	zp__early_drop_ended(engine, id, before);
	zp__unpark_all(engine);
}

bool zp__channel_is_known(const zp_engine *engine, uint64_t id)
{
	return id <= engine->channel_max || id >= ZP_FREE_CHANNEL;
}

void zp__channel_learn(zp_engine *engine, uint64_t id)
{
	if (!zp__channel_is_known(engine, id))
		engine->channel_max = id;
	zp__unpark_all(engine);
}

const char *zp_isa(void)
{
	return zp__reduce_kernels_of(zp__isa_best())->name;
}
