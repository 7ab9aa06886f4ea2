/* Links and connections: opening, closing, losing, and the queue of frames of a link that its connections take from.
 *
 * Work stealing. A link has one queue (of flows, which take turns frame by frame, so that attempts share the link); a
 * connection whose socket has room takes the next frame, sends it whole and goes to the end of the line. A connection
 * is at any time either busy (a frame in tx), blocked (its socket is full), runnable (its thread is about to look for a
 * frame) or idle (in link->idle). A new frame wakes the connection that is idle longest; all others look for frames by
 * themselves when they are done, so no frame is left behind while a connection could take it.
 *
 * Within a host one connection carries all that the CPUs can, and each more has buffers of its own that drive the others
 * out of the cache. There only the first local_senders_max open ones take frames; the rest stand by, and send nothing
 * but SETTLE and CONFIRM (settle.c).
 *
 * Everything here is under the lock; see zp_internal.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "zp_internal.h"

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

/* Frees a link whose connections are closed, or still the caller's. */
static void link_free(zp__link *link)
{
	for (uint32_t i = 0; i < link->connection_count; i++)
		zp__seal_close(link->connections[i].seal);
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
	zp__list_append(&link->open_flows, &flow->open_node);
}

/* The link forgets the flow with all its frames, queued and sent. */
void zp__flow_close(zp__flow *flow)
{
	zp__link_retract(flow);
	zp__list_remove(&flow->open_node);
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
	zp__list_init(&link->idle);
	zp__list_init(&link->event.node);
	link->room_bytes = UINT64_MAX;
	zp__flow_open(&link->messages, link, NULL);
	for (uint32_t i = 0; i < count; i++) {
		zp__connection *c = &link->connections[i];
		c->link = link;
		c->index = i;
		c->fd = fds[i];
		zp__settle_init(c);
		zp__list_init(&c->run_node);
		zp__list_init(&c->attention_node);
		zp__list_init(&c->idle_node);
		zp__list_init(&c->parked_node);
	}
	return link;
}

/* Lock held. True if one of the fds is among the engine's, or twice among these. */
static bool fds_taken(zp_engine *engine, const int *fds, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
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

/* Lock held. Gives a connection to a thread, which puts it into its epoll: were it done here, a failure halfway would
 * have to take connections back that their threads may already be working on. The connections of a link are spread over
 * the threads, and so are the first ones of all links, which may be the only ones that take frames. */
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
		link->local = link->local && zp__sock_is_local(link->connections[i].fd);
	link->senders_max =
		link->local && engine->config.local_senders_max ? engine->config.local_senders_max : UINT32_MAX;
	link->open = true;
	zp__list_append(&engine->links, &link->node);
	zp__thread_wake(&engine->threads[0]); /* It watches for paths that are broken. */
	for (uint32_t i = 0; i < link->connection_count; i++)
		connection_adopt(&link->connections[i]);
}

static int link_seal(zp__link *link, const zp_seal *seals)
{
	int rc = 0;
	link->sealed = seals != NULL;
	for (uint32_t i = 0; rc == 0 && seals && i < link->connection_count; i++)
		rc = zp__seal_open(&seals[i], &link->connections[i].seal);
	return rc;
}

int zp_link_open(zp_engine *engine, const uint8_t peer[], const int *fds, const zp_seal *seals, uint32_t count,
		 uint64_t *id)
{
	if (count < 1 || count > ZP_LINK_CONNECTIONS_MAX)
		return -EINVAL;
	int rc = 0;
	for (uint32_t i = 0; rc == 0 && i < count; i++)
		rc = zp__sock_prepare(fds[i], engine->config.path_timeout_ms);
	if (rc < 0)
		return rc;
	zp__link *link = link_new(engine, peer, fds, count);
	if (!link)
		return -ENOMEM;
	rc = link_seal(link, seals);
	pthread_mutex_lock(&engine->mutex);
	if (rc == 0 && (zp__link_find(engine, peer) || fds_taken(engine, fds, count)))
		rc = -EEXIST;
	if (rc == 0) {
		link->id = *id = ++engine->link_id_last;
		link_adopt(link);
	}
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		link_free(link); /* The fds are still the caller's. */
	return rc;
}

/* Lock held. Puts a connection into its place, if all that forbids it is not the case. */
static int link_add(zp__link *link, uint32_t index, uint32_t generation, int fd, zp__seal *seal, const void *first,
		    uint32_t first_bytes)
{
	if (index >= link->connection_count || link->sealed != (seal != NULL))
		return -EINVAL;
	zp__connection *c = &link->connections[index];
	int rc = zp__settle_may_add(c, generation);
	if (rc < 0)
		return rc;
	if (first_bytes) { /* It fits into the buffer of a socket over which nothing is sent yet. */
		struct iovec iov = {(void *)(uintptr_t)first, first_bytes};
		ssize_t n = zp__sock_send(fd, &iov, 1);
		if (n != (ssize_t)first_bytes)
			return n < 0 ? (int)n : -EIO;
	}
	c->fd = fd;
	c->seal = seal;
	c->watched = c->readable = c->writable = c->hung_up = c->closing = false;
	c->silent_ns = 0;
	zp__settle_added(c, generation);
	connection_adopt(c);
	return 0;
}

int zp_link_add(zp_engine *engine, const uint8_t peer[], uint64_t id, uint32_t index, uint32_t generation, int fd,
		const zp_seal *how, const void *first, uint32_t first_bytes)
{
	zp__seal *seal = NULL;
	if (first_bytes > ZP_FIRST_BYTES_MAX || (first_bytes && !first))
		return -EINVAL;
	int rc = zp__sock_prepare(fd, engine->config.path_timeout_ms);
	if (rc == 0 && how)
		rc = zp__seal_open(how, &seal);
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&engine->mutex);
	zp__link *link = zp__link_find(engine, peer);
	if (!link || link->id != id)
		rc = -ENOTCONN;
	else if (fds_taken(engine, &fd, 1))
		rc = -EEXIST;
	else
		rc = link_add(link, index, generation, fd, seal, first, first_bytes);
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		zp__seal_close(seal);
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
		stats->resent_frames = link->resent_frames;
		stats->message_bytes = link->message_bytes;
		for (uint32_t i = 0; i < link->connection_count; i++) {
			const zp__connection *c = &link->connections[i];
			stats->open_count += is_live(c);
			stats->tx_bytes[i] = c->tx_bytes;
			stats->rx_bytes[i] = c->rx_bytes;
			stats->generation[i] = c->settling.generation;
		}
	}
	pthread_mutex_unlock(&engine->mutex);
	return link ? 0 : -ENOTCONN;
}

/* Takes the link out of use: its connections are shut down now and closed by their threads soon, attempts on it fail,
 * and, if `tell`, a LINK_LOST follows. */
void zp__link_lose(zp__link *link, int status, bool tell)
{
	if (!link->open)
		return;
	link->open = false;
	zp__list_remove(&link->node);
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		c->closing = true;
		if (c->fd >= 0)
			shutdown(c->fd, SHUT_RDWR);
		zp__connection_attend(c);
	}
	zp__attempts_fail(link, status);
	zp__settle_discard(link);
	zp__message_flow_clear(link);
	if (tell) {
		link->event.event = (zp_event){.kind = ZP_EVENT_LINK_LOST, .status = status, .id = link->id};
		memcpy(link->event.event.peer, link->peer, ZP_PEER_ID_BYTES);
		link->references++;
		zp__event_push(&link->engine->queue, &link->event);
	}
	zp__link_release(link);
}

/* Takes a connection out of use: it is shut down now, closed by its thread soon, and then settled with the other end.
 * Without any other the link is lost. */
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

/* True if the connection is one of those of its link that take frames. */
bool zp__connection_may_send(const zp__connection *connection)
{
	const zp__link *link = connection->link;
	uint32_t before = 0;
	for (uint32_t i = 0; i < connection->index && before < link->senders_max; i++)
		before += is_live(&link->connections[i]);
	return before < link->senders_max;
}

/* Wakes the connection that is idle longest of those that may take a frame. What tells of connections goes over any: it
 * must not wait for one that is held up, as what holds it up may wait for what it tells. */
void zp__link_wake_idle(zp__link *link)
{
	ZP__EACH(node, &link->idle)
	{
		zp__connection *c = ZP__ELEMENT(node, zp__connection, idle_node);
		if (!zp__connection_may_send(c))
			continue;
		zp__connection_attend(c);
		return;
	}
	if (!zp__list_empty(&link->control) && !zp__list_empty(&link->idle))
		zp__connection_attend(ZP__ELEMENT(link->idle.next, zp__connection, idle_node));
}

/* Puts a frame at the end of `flow` and wakes a connection for it. */
void zp__link_offer(zp__link *link, zp__flow *flow, zp__list *frame)
{
	if (!link->open)
		return;
	if (zp__list_empty(&flow->frames))
		zp__list_append(&link->flows, &flow->node);
	zp__list_append(&flow->frames, frame);
	zp__link_wake_idle(link);
}

/* Takes all frames of a flow out of the queue. */
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

/* True if the other end has owed acknowledgements for too long. Small looks at short intervals tell a path that is
 * silent from one over which nothing was sent before. */
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

/* Loses connections whose path is broken, though no error says so. Looks at all of them in turns. */
uint64_t zp__links_check(zp_engine *engine, uint64_t now_ns)
{
	uint64_t timeout_ns = engine->config.path_timeout_ms * (uint64_t)1000000;
	uint64_t interval_ns = timeout_ns / LOOKS_PER_TIMEOUT;
	if (!timeout_ns || zp__list_empty(&engine->links))
		return UINT64_MAX;
	if (now_ns < engine->links_check_ns)
		return engine->links_check_ns;
	engine->links_check_ns = now_ns + interval_ns;
	ZP__EACH(node, &engine->links)
	{
		zp__link *link = ZP__ELEMENT(node, zp__link, node);
		for (uint32_t i = 0; link->open && i < link->connection_count; i++)
			if (is_silent(&link->connections[i], now_ns, interval_ns, timeout_ns))
				zp__connection_lose(&link->connections[i], -ETIMEDOUT);
	}
	return engine->links_check_ns;
}

/* By the connection's thread, or when the threads have ended. */
void zp__connection_close(zp__connection *connection)
{
	zp__link *link = connection->link;
	assert(connection->fd >= 0);
	zp__list_remove(&connection->run_node);
	zp__list_remove(&connection->attention_node);
	zp__list_remove(&connection->idle_node);
	zp__list_remove(&connection->parked_node);
	if (connection->watched) /* Explicitly, because a child process may still have the socket open. */
		epoll_ctl(connection->thread->epoll_fd, EPOLL_CTL_DEL, connection->fd, NULL);
	close(connection->fd);
	connection->fd = -1;
	zp__seal_close(connection->seal);
	connection->seal = NULL;
	free(connection->tx.aside);
	zp__memory_unmap(connection->landing, connection->landing_bytes);
	connection->landing = NULL;
	connection->landing_bytes = 0;
	if (link->open)
		zp__settle_closed(connection);
	else if (connection->tx.message)
		zp__message_sent(link, connection->tx.message);
	if (connection->rx.message)
		zp__message_forget(link->engine, connection->rx.message);
	connection->tx = (zp__transmit){0};
	connection->rx = (zp__receive){0};
	if (link->open && !zp__list_empty(&link->flows))
		zp__link_wake_idle(link); /* Another one now sends in its stead. */
	zp__link_release(link);
}
