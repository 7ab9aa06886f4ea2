/* The sending half of a connection, run by the connection's thread. A turn sends at most one frame, so that the
 * connections of a thread take turns and one reduce spreads over all of them. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>

#include "attempt.h"
#include "early.h"
#include "engine.h"
#include "link.h"
#include "message.h"

/* Lock held. Takes the next frame of the link; its flow goes to the end of link->flows. False: there is none. */
static bool frame_take(zp__connection *c)
{
	zp__link *link = c->link;
	if (zp__retransmit_take(c) || zp__announcement_take(c))
		return true;
	zp__flow *flow;
	zp__list *frame = zp__connection_may_send(c) ? zp__frame_next(link, &flow) : NULL;
	if (!frame)
		return false;
	zp__list_remove(frame);
	zp__list_remove(&flow->node);
	if (!zp__list_empty(&flow->frames))
		zp__list_append(&link->flows, &flow->node);
	c->tx = (zp__transmit){.active = true, .attempt = flow->attempt, .flow = flow};
	if (flow->attempt)
		c->tx.slot = ZP__ELEMENT(frame, zp__slot, node);
	else
		c->tx.message = ZP__ELEMENT(frame, zp__message_out, node);
	return true;
}

static void message_prepare(zp__transmit *tx)
{
	const zp__message_out *message = tx->message;
	zp__frame frame = {
		.kind = ZP__MESSAGE, .id = message->channel, .length = message->bytes, .checksum = message->checksum};
	zp__frame_encode(tx->header, &frame);
	tx->length = message->bytes;
	tx->body = message->body;
}

/* Sends as much of the frame as the socket takes. Returns the number of bytes, 0 when it is full, or -errno. */
static ssize_t frame_send(zp__connection *c)
{
	const zp__transmit *tx = &c->tx;
	struct iovec iov[2];
	int count = 0;
	uint64_t body_sent = 0;
	if (tx->sent < ZP__HEADER_BYTES)
		iov[count++] = (struct iovec){(void *)(uintptr_t)(tx->header + tx->sent), ZP__HEADER_BYTES - tx->sent};
	else
		body_sent = tx->sent - ZP__HEADER_BYTES;
	if (body_sent < tx->length)
		iov[count++] = (struct iovec){(void *)(uintptr_t)(tx->body + body_sent), tx->length - body_sent};
	size_t wanted = ZP__HEADER_BYTES + (size_t)tx->length - tx->sent;
	if (c->records)
		return zp__record_send(c, iov, count);
	ssize_t n = zp__connection_send(c, iov, count);
	if (n == -EAGAIN || n == -EWOULDBLOCK)
		n = 0;
	if (n >= 0 && (size_t)n < wanted)
		c->writable = false;
	return n;
}

/* Lock held. Accounts for `n` bytes sent. True: the frame is complete, and c->tx is free. */
static bool frame_account(zp__connection *c, uint64_t n)
{
	zp__transmit *tx = &c->tx;
	tx->sent += n;
	c->tx_bytes += n;
	if (tx->attempt)
		tx->attempt->tx_bytes += n;
	if (tx->attempt || tx->aside)
		c->link->moved_bytes += n;
	if (tx->sent < ZP__HEADER_BYTES + (uint64_t)tx->length)
		return false;
	zp__retransmit_sent(c);
	if (tx->attempt || tx->aside)
		zp__attempt_moved(tx->attempt, c->link);
	if (tx->attempt)
		tx->attempt->algorithm->sent(tx->attempt, tx->slot);
	free(tx->aside);
	*tx = (zp__transmit){0};
	return true;
}

int zp__send_turn(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	zp__transmit *tx = &c->tx;
	if (!c->writable)
		return 0;
	int rc = c->records ? zp__record_flush(c) : 1;
	if (rc <= 0)
		return rc;
	pthread_mutex_lock(&engine->mutex);
	if (!c->link->open || c->closing || (!tx->active && !frame_take(c))) {
		if (c->link->open && !c->closing && zp__list_empty(&c->idle_node))
			zp__list_append(&c->link->idle, &c->idle_node);
		pthread_mutex_unlock(&engine->mutex);
		return 0;
	}
	zp__list_remove(&c->idle_node); /* It may have become readable while it was idle, and then found a frame. */
	zp__attempt *attempt = tx->attempt;
	if (attempt)
		attempt->pins++;
	tx->sending = true;
	pthread_mutex_unlock(&engine->mutex);

	if (!tx->body) {
		if (attempt)
			attempt->algorithm->prepare(c);
		else if (tx->message)
			message_prepare(tx);
	}
	ssize_t n = frame_send(c);

	pthread_mutex_lock(&engine->mutex);
	bool awaited = tx->awaited;
	tx->sending = tx->awaited = false;
	bool complete = n >= 0 && frame_account(c, (uint64_t)n);
	if (awaited)
		zp__unpark_all(engine);
	if (attempt)
		zp__attempt_unpin(engine, attempt);
	pthread_mutex_unlock(&engine->mutex);
	return n < 0 ? (int)n : complete;
}
