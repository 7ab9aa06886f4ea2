/* Links and connections: opening, closing, losing, and the queue of frames of a link that its connections take from.
 *
 * Work stealing. A link has one queue (of flows, which take turns frame by frame, so that attempts share the link); a
 * connection whose socket has room takes the next frame, sends it whole and goes to the end of the line. A connection
 * is at any time either busy (a frame in tx), blocked (its socket is full), runnable (its thread is about to look for a
 * frame) or idle (in link->idle). A new frame wakes the connection that is idle longest; all others look for frames by
 * themselves when they are done, so no frame is left behind while a connection could take it.
 *
 * Everything here is under the lock; see zp_internal.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
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

void zp__link_release(zp__link *link)
{
	assert(link->references > 0);
	if (--link->references == 0)
		free(link);
}

static zp__link *link_new(zp_engine *engine, const uint8_t peer[], const int *fds, uint32_t count)
{
	zp__link *link = calloc(1, sizeof *link + count * sizeof *link->connections);
	if (!link)
		return NULL;
	link->engine = engine;
	memcpy(link->peer, peer, ZP_PEER_ID_BYTES);
	link->references = 1;
	link->connection_count = count;
	zp__list_init(&link->node);
	zp__list_init(&link->flows);
	zp__list_init(&link->idle);
	zp__list_init(&link->event.node);
	zp__list_init(&link->messages.node);
	zp__list_init(&link->messages.frames);
	for (uint32_t i = 0; i < count; i++) {
		zp__connection *c = &link->connections[i];
		c->link = link;
		c->index = i;
		c->fd = fds[i];
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

/* Lock held. Gives each connection to a thread, which puts it into its epoll: were it done here, a failure halfway
 * would have to take connections back that their threads may already be working on. */
static void link_adopt(zp__link *link)
{
	zp_engine *engine = link->engine;
	link->open = true;
	link->references += link->connection_count;
	zp__list_append(&engine->links, &link->node);
	zp__thread_wake(&engine->threads[0]); /* It watches for paths that are broken. */
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		c->thread = &engine->threads[engine->thread_next++ % engine->thread_count];
		zp__connection_attend(c);
	}
}

int zp_link_open(zp_engine *engine, const uint8_t peer[], const int *fds, uint32_t count, uint64_t *id)
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
	pthread_mutex_lock(&engine->mutex);
	if (engine->shut_down)
		rc = -ESHUTDOWN;
	else if (zp__link_find(engine, peer) || fds_taken(engine, fds, count))
		rc = -EEXIST;
	if (rc == 0) {
		link->id = *id = ++engine->link_id_last;
		link_adopt(link);
	}
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		free(link); /* The fds are still the caller's. */
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
		stats->connection_count = link->connection_count;
		for (uint32_t i = 0; i < link->connection_count; i++) {
			stats->tx_bytes[i] = link->connections[i].tx_bytes;
			stats->rx_bytes[i] = link->connections[i].rx_bytes;
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
	zp_engine *engine = link->engine;
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
	zp__message_flow_clear(link);
	pthread_cond_broadcast(&engine->room);
	if (tell) {
		link->event.event = (zp_event){.kind = ZP_EVENT_LINK_LOST, .status = status, .id = link->id};
		memcpy(link->event.event.peer, link->peer, ZP_PEER_ID_BYTES);
		link->references++;
		zp__event_push(engine, &link->event);
	}
	zp__link_release(link);
}

/* Puts a frame at the end of `flow` and wakes a connection for it. */
void zp__link_offer(zp__link *link, zp__flow *flow, zp__list *frame)
{
	if (!link->open)
		return;
	if (zp__list_empty(&flow->frames))
		zp__list_append(&link->flows, &flow->node);
	zp__list_append(&flow->frames, frame);
	if (!zp__list_empty(&link->idle))
		zp__connection_attend(ZP__ELEMENT(link->idle.next, zp__connection, idle_node));
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
	uint64_t silence_ns = c->fd >= 0 && !c->closing ? zp__sock_silence_ms(c->fd) * 1000000u : 0;
	if (silence_ns < interval_ns) {
		c->silent_ns = 0;
		return false;
	}
	if (!c->silent_ns)
		c->silent_ns = now_ns - interval_ns;
	return now_ns - c->silent_ns >= timeout_ns;
}

/* Loses links whose path is broken, though no error says so. Looks at all of them in turns. */
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
				zp__link_lose(link, -ETIMEDOUT, true);
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
	free(connection->tx.aside);
	if (connection->tx.message)
		zp__message_sent(link, connection->tx.message);
	if (connection->rx.message)
		zp__message_forget(link->engine, connection->rx.message);
	connection->tx = (zp__transmit){0};
	connection->rx = (zp__receive){0};
	zp__link_release(link);
}
