/* Links and connections: opening, closing, loss, and the queue of frames of a link, which its connections share.
 *
 * One queue, many connections. The queue of a link consists of flows that take turns frame by frame, so that attempts
 * share the link. A connection whose socket has space takes the next frame, sends all of it, and queues for the next.
 * At any time a connection is busy (a frame in tx), blocked (its socket is full), runnable (its thread is about to look
 * for a frame) or idle (in link->idle). A new frame wakes the connection that has been idle longest; the others look
 * for frames by themselves when they are done. So no frame waits while a connection could take it.
 *
 * Only the first `senders_max` open connections of a link take frames; the others stand by and send only
 * acknowledgements (retransmit.c) and announcements (early.c). Within a host senders_max is local_senders_max: one
 * connection is as fast as the CPUs, and the buffers of more connections would evict each other from the cache. Between
 * hosts zp_link_set_senders() sets it: on a slow path many connections would only fill the queue.
 *
 * Everything here runs under the lock; see engine.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "attempt.h"
#include "early.h"
#include "engine.h"
#include "link.h"
#include "memory.h"
#include "message.h"
#include "sock.h"

#define LOOKS_PER_TIMEOUT 12

zp__link *zp__link_find(zp_engine *engine, const uint8_t peer[])
{
	ZP__EACH(node, &engine->links)
	{
		zp__link *link = ZP__ELEMENT(node, zp__link, node);
		if (memcmp(link->peer, peer, ZP_PEER_ID_BYTES) == 0)
			return link;
	}
	return NULL;
}

/* Frees a link whose connections are closed or were never taken over from the caller. */
static void link_free(zp__link *link)
{
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__record_layer_close(link->connections[i].records);
		zp__shm_close(link->connections[i].shm);
	}
	free(link);
}

static bool is_live(const zp__connection *c)
{
	return c->fd >= 0 && !c->closing;
}

void zp__link_release(zp__link *link)
{
	assert(link->references > 0);
	if (--link->references == 0)
		link_free(link);
}

void zp__flow_open(zp__flow *flow, zp__link *link, zp__attempt *attempt)
{
	zp__list_init(&flow->node);
	zp__list_init(&flow->frames);
	for (uint32_t i = 0; i < link->connection_count; i++)
		zp__list_init(&flow->sent[i]);
	flow->attempt = attempt;
	zp__list_init(&flow->started_node);
	zp__list_append(&link->open_flows, &flow->open_node);
}

/* Removes the flow and all its frames, queued and sent, from its link. */
void zp__flow_close(zp__link *link, zp__flow *flow)
{
	zp__link_retract(flow);
	zp__list_remove(&flow->open_node);
	zp__list_remove(&flow->started_node);
	zp__eager_release(link, flow);
}

static zp__link *link_new(zp_engine *engine, const uint8_t peer[], const int *fds, uint32_t count)
{
	zp__link *link = calloc(1, sizeof *link);
	if (!link)
		return NULL;
	link->engine = engine;
	memcpy(link->peer, peer, ZP_PEER_ID_BYTES);
	link->references = 1;
	link->connection_count = count;
	zp__list_init(&link->node);
	zp__list_init(&link->control);
	zp__list_init(&link->open_flows);
	zp__list_init(&link->flows);
	zp__list_init(&link->started);
	zp__list_init(&link->idle);
	zp__list_init(&link->event.node);
	link->writable_bytes = UINT64_MAX;
	zp__flow_open(&link->messages, link, NULL);
	for (uint32_t i = 0; i < count; i++) {
		zp__connection *c = &link->connections[i];
		c->link = c->rx.link = link;
		c->index = i;
		c->fd = fds[i];
		zp__retransmit_init(c);
		zp__list_init(&c->run_node);
		zp__list_init(&c->attention_node);
		zp__list_init(&c->idle_node);
		zp__list_init(&c->parked_node);
	}
	return link;
}

/* Lock held. True if the engine already owns one of the fds, or one occurs twice. */
static bool fds_taken(zp_engine *engine, const int *fds, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		if (fds[i] < 0)
			continue;
		for (uint32_t k = 0; k < i; k++)
			if (fds[i] == fds[k])
				return true;
		ZP__EACH(node, &engine->links)
		{
			const zp__link *link = ZP__ELEMENT(node, zp__link, node);
			for (uint32_t k = 0; k < link->connection_count; k++)
				if (link->connections[k].fd == fds[i])
					return true;
		}
	}
	return false;
}

/* Lock held. Assigns a connection to a thread. The thread itself begins to watch it. If this function did, a failure
 * halfway would have to take back connections that their threads may already be using. The connections of a link are
 * spread over the threads; so are the first connections of all links, which may be the only ones that send frames. */
static void connection_adopt(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	c->link->references++;
	c->thread = &engine->threads[(c->link->id + c->index) % engine->thread_count];
	zp__connection_attend(c);
}

static void link_adopt(zp__link *link)
{
	zp_engine *engine = link->engine;
	link->local = true;
	for (uint32_t i = 0; i < link->connection_count; i++)
		link->local = link->local && (link->connections[i].fd < 0 || zp__sock_is_local(link->connections[i].fd));
	link->senders_max =
		link->local && engine->config.local_senders_max ? engine->config.local_senders_max : UINT32_MAX;
	link->open = true;
	link->resume_ns = UINT64_MAX;
	zp__list_append(&engine->links, &link->node);
	engine->link_count++;
	zp__thread_wake(&engine->threads[0]); /* It checks links for broken paths. */
	for (uint32_t i = 0; i < link->connection_count; i++)
		if (link->connections[i].fd >= 0)
			connection_adopt(&link->connections[i]);
	if (engine->channel_max)
		zp__opened_offer(link);
}

static int link_encrypt(zp__link *link, const zp_aead *aeads)
{
	int rc = 0;
	link->encrypted = aeads != NULL;
	for (uint32_t i = 0; rc == 0 && aeads && i < link->connection_count; i++)
		if (link->connections[i].fd >= 0)
			rc = zp__record_layer_open(&aeads[i], &link->connections[i].records);
	return rc;
}

/* Makes the shared memory of a connection, if the engine uses it. */
static int link_share(zp__link *link, uint32_t index, int fd)
{
	return link->engine->config.shared_memory ? zp__shm_open(fd, &link->connections[index].shm) : 0;
}

int zp_link_open(zp_engine *engine, const uint8_t peer[], const int *fds, const zp_aead *aeads, uint32_t count,
		 uint64_t *id)
{
	if (count < 1 || count > ZP_LINK_CONNECTIONS_MAX || fds[0] < 0)
		return -EINVAL;
	int rc = 0;
	for (uint32_t i = 0; rc == 0 && i < count; i++)
		if (fds[i] >= 0)
			rc = zp__sock_prepare(fds[i], engine->config.path_timeout_ms);
	if (rc < 0)
		return rc;
	zp__link *link = link_new(engine, peer, fds, count);
	if (!link)
		return -ENOMEM;
	rc = link_encrypt(link, aeads);
	pthread_mutex_lock(&engine->mutex);
	if (rc == 0 && engine->stopping)
		rc = -ESHUTDOWN;
	if (rc == 0 && (zp__link_find(engine, peer) || fds_taken(engine, fds, count)))
		rc = -EEXIST;
	for (uint32_t i = 0; rc == 0 && i < count; i++) /* Last, because the other end sees it. */
		if (fds[i] >= 0)
			rc = link_share(link, i, fds[i]);
	if (rc == 0) {
		link->id = *id = ++engine->link_id_last;
		link_adopt(link);
	}
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		link_free(link); /* The caller still owns the fds. */
	return rc;
}

/* Lock held. Checks the arguments of zp_link_add() and adds the connection. */
static int link_add(zp__link *link, uint32_t index, uint32_t generation, int fd, zp__record_layer *records,
		    const void *first, uint32_t first_bytes)
{
	if (index >= link->connection_count || link->encrypted != (records != NULL))
		return -EINVAL;
	zp__connection *c = &link->connections[index];
	int rc = zp__retransmit_may_add(c, generation);
	if (rc < 0)
		return rc;
	if (first_bytes) { /* It fits: the send buffer of this socket is empty. */
		struct iovec iov = {(void *)(uintptr_t)first, first_bytes};
		ssize_t n = zp__sock_send(fd, &iov, 1);
		if (n != (ssize_t)first_bytes)
			return n < 0 ? (int)n : -EIO;
	}
	rc = link_share(link, index, fd);
	if (rc < 0 && !first_bytes)
		return rc;
	c->fd = fd;
	c->records = records;
	c->watched = c->readable = c->writable = c->hung_up = c->closing = false;
	c->silent_ns = 0;
	zp__retransmit_added(c, generation);
	connection_adopt(c);
	if (rc < 0) /* `first` told the other end that it is taken. So it is taken, and then lost. */
		zp__connection_lose(c, rc);
	return 0;
}

int zp_link_add(zp_engine *engine, const uint8_t peer[], uint64_t id, uint32_t index, uint32_t generation, int fd,
		const zp_aead *aead, const void *first, uint32_t first_bytes)
{
	zp__record_layer *records = NULL;
	if (first_bytes > ZP_FIRST_BYTES_MAX || (first_bytes && !first))
		return -EINVAL;
	int rc = zp__sock_prepare(fd, engine->config.path_timeout_ms);
	if (rc == 0 && aead)
		rc = zp__record_layer_open(aead, &records);
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&engine->mutex);
	zp__link *link = zp__link_find(engine, peer);
	if (engine->stopping)
		rc = -ESHUTDOWN;
	else if (!link || link->id != id)
		rc = -ENOTCONN;
	else if (fds_taken(engine, &fd, 1))
		rc = -EEXIST;
	else
		rc = link_add(link, index, generation, fd, records, first, first_bytes);
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		zp__record_layer_close(records);
	return rc;
}

int zp_link_close(zp_engine *engine, const uint8_t peer[])
{
	pthread_mutex_lock(&engine->mutex);
	zp__link *link = zp__link_find(engine, peer);
	if (link)
		zp__link_lose(link, -ECONNABORTED, false);
	pthread_mutex_unlock(&engine->mutex);
	return link ? 0 : -ENOTCONN;
}

int zp_link_get_stats(zp_engine *engine, const uint8_t peer[], zp_link_stats *stats)
{
	memset(stats, 0, sizeof *stats);
	pthread_mutex_lock(&engine->mutex);
	const zp__link *link = zp__link_find(engine, peer);
	if (link) {
		stats->link = link->id;
		stats->connection_count = link->connection_count;
		stats->lost_count = link->lost_count;
		stats->local = link->local;
		stats->senders = link->senders_max < link->connection_count ? link->senders_max : link->connection_count;
		stats->message_bytes = link->message_bytes;
		for (uint32_t i = 0; i < link->connection_count; i++) {
			const zp__connection *c = &link->connections[i];
			stats->open_count += is_live(c);
			stats->tx_bytes[i] = c->tx_bytes;
			stats->rx_bytes[i] = c->rx_bytes;
			stats->generation[i] = c->retransmit.generation;
		}
	}
	pthread_mutex_unlock(&engine->mutex);
	return link ? 0 : -ENOTCONN;
}

int zp_link_set_senders(zp_engine *engine, const uint8_t peer[], uint32_t senders)
{
	if (!senders)
		return -EINVAL;
	pthread_mutex_lock(&engine->mutex);
	zp__link *link = zp__link_find(engine, peer);
	if (link) {
		link->senders_max = senders;
		ZP__EACH(node, &link->idle)
		zp__connection_attend(ZP__ELEMENT(node, zp__connection, idle_node)); /* It may be a sender now. */
	}
	pthread_mutex_unlock(&engine->mutex);
	return link ? 0 : -ENOTCONN;
}

int zp_link_get_flow(zp_engine *engine, const uint8_t peer[], zp_link_flow *flow)
{
	uint32_t slowest_us = 0;
	*flow = (zp_link_flow){.round_trip_us = UINT32_MAX};
	pthread_mutex_lock(&engine->mutex);
	const zp__link *link = zp__link_find(engine, peer);
	if (link) {
		flow->link = link->id;
		flow->connection_count = link->connection_count;
		for (uint32_t i = 0; i < link->connection_count; i++) {
			zp__sock_flow one;
			if (link->local || !is_live(&link->connections[i]) || !zp__sock_flow_of(link->connections[i].fd, &one))
				continue;
			flow->acked_bytes[i] = one.acked_bytes;
			flow->busy_us[i] = one.busy_us;
			flow->limited[i] = one.limited;
			if (one.round_trip_us < flow->round_trip_us)
				flow->round_trip_us = one.round_trip_us;
			if (one.smoothed_us > slowest_us)
				slowest_us = one.smoothed_us;
		}
		if (slowest_us > flow->round_trip_us)
			flow->queued_us = slowest_us - flow->round_trip_us;
	}
	pthread_mutex_unlock(&engine->mutex);
	return link ? 0 : -ENOTCONN;
}

/* Takes the link out of use: shuts its connections down (their threads close them soon), fails the attempts that use it
 * and, if `tell`, queues LINK_LOST. */
void zp__link_lose(zp__link *link, int status, bool tell)
{
	if (!link->open)
		return;
	link->open = false;
	zp__list_remove(&link->node);
	link->engine->link_count--;
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		c->closing = true;
		if (c->fd >= 0)
			shutdown(c->fd, SHUT_RDWR);
		zp__connection_attend(c);
	}
	zp__attempts_fail(link, status);
	zp__retransmit_discard(link);
	zp__message_flow_clear(link);
	zp__early_drop(link);
	zp__unpark_all(link->engine); /* The other links have a greater share of the room for messages. */
	if (tell) {
		link->event.event = (zp_event){.kind = ZP_EVENT_LINK_LOST, .status = status, .id = link->id};
		memcpy(link->event.event.peer, link->peer, ZP_PEER_ID_BYTES);
		link->references++;
		zp__event_push(&link->engine->queue, &link->event);
	}
	zp__link_release(link);
}

/* Takes a connection out of use: shuts it down; its thread closes it soon and starts the retransmission of its frames.
 * If it is the last one the link is lost. */
void zp__connection_lose(zp__connection *c, int status)
{
	zp__link *link = c->link;
	if (!link->open || !is_live(c))
		return;
	bool last = true;
	for (uint32_t i = 0; i < link->connection_count; i++)
		last &= &link->connections[i] == c || !is_live(&link->connections[i]);
	if (last) {
		zp__link_lose(link, status, true);
		return;
	}
	c->closing = true;
	c->lost_status = status;
	shutdown(c->fd, SHUT_RDWR);
	zp__connection_attend(c);
}

/* True if the connection is one of the `senders_max` of its link that take frames. */
bool zp__connection_may_send(const zp__connection *connection)
{
	const zp__link *link = connection->link;
	uint32_t before = 0;
	for (uint32_t i = 0; i < connection->index && before < link->senders_max; i++)
		before += is_live(&link->connections[i]);
	return before < link->senders_max;
}

/* Wakes the connection that has been idle longest among those that may take a frame. False: there is none. */
bool zp__link_wake_idle(zp__link *link)
{
	ZP__EACH(node, &link->idle)
	{
		zp__connection *c = ZP__ELEMENT(node, zp__connection, idle_node);
		if (!zp__connection_may_send(c))
			continue;
		zp__connection_attend(c);
		return true;
	}
	return false;
}

/* Wakes a connection for an acknowledgement or announcement, which may go over any connection: it must not wait for a
 * blocked one, since the other end may unblock that one only after it has received the frame. */
void zp__link_wake_any(zp__link *link)
{
	if (!zp__link_wake_idle(link) && !zp__list_empty(&link->idle))
		zp__connection_attend(ZP__ELEMENT(link->idle.next, zp__connection, idle_node));
}

/* Lets the connections look for frames again, because more may be sent now. */
void zp__link_look_again(zp__link *link)
{
	if (!link->withholds || !link->open)
		return;
	link->withholds = false;
	for (uint32_t i = 0; i < link->connection_count; i++)
		zp__connection_attend(&link->connections[i]);
}

ssize_t zp__connection_send(zp__connection *c, struct iovec *iov, int count)
{
	return c->shm ? zp__shm_send(c, iov, count) : zp__sock_send(c->fd, iov, count);
}

ssize_t zp__connection_receive(zp__connection *c, struct iovec *iov, int count)
{
	return c->shm ? zp__shm_receive(c, iov, count) : zp__sock_receive(c->fd, iov, count);
}

/* Puts a frame at the end of `flow` and wakes a connection for it. */
void zp__link_offer(zp__link *link, zp__flow *flow, zp__list *frame)
{
	zp__link_offer_before(link, flow, &flow->frames, frame);
}

/* Puts a frame before another one, `next`, of the same flow, and wakes a connection for it. */
void zp__link_offer_before(zp__link *link, zp__flow *flow, zp__list *next, zp__list *frame)
{
	if (!link->open)
		return;
	if (zp__list_empty(&flow->frames))
		zp__list_append(&link->flows, &flow->node);
	zp__list_append(next, frame);
	zp__link_wake_idle(link);
}

/* Removes all frames of a flow from the queue. */
void zp__link_retract(zp__flow *flow)
{
	ZP__EACH(frame, &flow->frames)
	zp__list_remove(frame);
	zp__list_remove(&flow->node);
}

void zp__unpark(zp__connection *connection)
{
	if (zp__list_empty(&connection->parked_node))
		return;
	zp__list_remove(&connection->parked_node);
	zp__connection_attend(connection);
}

void zp__unpark_all(zp_engine *engine)
{
	ZP__EACH(node, &engine->parked)
	zp__unpark(ZP__ELEMENT(node, zp__connection, parked_node));
}

/* True if the other end has owed TCP acknowledgements for `timeout_ns`. Because it is called at short intervals, it can
 * distinguish a silent path from one on which nothing was sent until now. */
static bool is_silent(zp__connection *c, uint64_t now_ns, uint64_t interval_ns, uint64_t timeout_ns)
{
	uint64_t silence_ns = is_live(c) ? zp__sock_silence_ms(c->fd) * 1000000u : 0;
	if (silence_ns < interval_ns) {
		c->silent_ns = 0;
		return false;
	}
	if (!c->silent_ns)
		c->silent_ns = now_ns - interval_ns;
	return now_ns - c->silent_ns >= timeout_ns;
}

/* Loses connections whose path is broken without a socket error, and links on which the rest of a message does not
 * come. Checks all links LOOKS_PER_TIMEOUT times per timeout. Returns the next deadline. */
uint64_t zp__links_check(zp_engine *engine, uint64_t now_ns)
{
	uint64_t timeout_ns = engine->config.path_timeout_ms * (uint64_t)1000000;
	uint64_t stall_ns = zp__stall_timeout_ns(engine);
	uint64_t interval_ns = (timeout_ns && timeout_ns < stall_ns ? timeout_ns : stall_ns) / LOOKS_PER_TIMEOUT;
	if (zp__list_empty(&engine->links))
		return UINT64_MAX;
	if (now_ns < engine->links_check_ns)
		return engine->links_check_ns;
	/* This process stood still: what has come meanwhile is not read yet. */
	bool is_late = now_ns > engine->links_check_ns + interval_ns;
	engine->links_check_ns = now_ns + interval_ns;
	ZP__EACH(node, &engine->links)
	{
		zp__link *link = ZP__ELEMENT(node, zp__link, node);
		for (uint32_t i = 0; link->open && i < link->connection_count; i++) {
			zp__connection *c = &link->connections[i];
			if (is_late)
				c->rx.due_ns = now_ns + stall_ns;
			if (c->rx.message && c->rx.due_ns <= now_ns)
				zp__link_lose(link, -ETIMEDOUT, true);
			else if (timeout_ns && is_silent(c, now_ns, interval_ns, timeout_ns))
				zp__connection_lose(c, -ETIMEDOUT);
		}
	}
	return engine->links_check_ns;
}

/* Called by the connection's thread, or after the threads have ended. */
void zp__connection_close(zp__connection *connection)
{
	zp__link *link = connection->link;
	assert(connection->fd >= 0);
	zp__list_remove(&connection->run_node);
	zp__list_remove(&connection->attention_node);
	zp__list_remove(&connection->idle_node);
	zp__list_remove(&connection->parked_node);
	if (connection->watched)
		zp__waiter_remove(&connection->thread->waiter, connection);
	close(connection->fd);
	connection->fd = -1;
	zp__record_layer_close(connection->records);
	connection->records = NULL;
	zp__shm_close(connection->shm);
	connection->shm = NULL;
	free(connection->tx.aside);
	zp__memory_unmap(connection->rx.landing, connection->rx.landing_bytes);
	if (link->open)
		zp__retransmit_closed(connection);
	else if (connection->tx.message)
		zp__message_sent(link, connection->tx.message);
	if (connection->rx.message)
		zp__message_forget(link->engine, connection->rx.message);
	connection->tx = (zp__transmit){0};
	connection->rx = (zp__receive){.link = link};
	if (link->open && !zp__list_empty(&link->flows))
		zp__link_wake_idle(link); /* Another connection may now be among the senders. */
	zp__link_release(link);
}
