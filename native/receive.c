/* The receiving half of a connection, run by the connection's thread.
 *
 *            header complete           admitted                    body complete
 *   HEADER ------------------> ADMIT --------------> BODY --------------------------> HEADER
 *                             |  ^ |  stale, or its attempt failed                      ^
 *                    no room  v  | +----------------> DRAIN ----------------------------+
 *                            parked                     ^ its attempt ended
 *                                              BODY ----+
 *
 * A turn receives at most one frame, and takes at most ZP__TURN_STEPS steps, so that the connections of a thread take
 * turns: a header can announce 4 GiB, and a record can have one byte. A body is received straight to its destination;
 * the same system call reads as much of the next header as has arrived. On an encrypted connection these functions see
 * only decrypted, verified bytes (record.c). */
#include <assert.h>
#include <errno.h>
#include <sys/uio.h>

#include "attempt.h"
#include "early.h"
#include "engine.h"
#include "link.h"
#include "message.h"
#include "sock.h"

enum step { NOTHING_MORE = 0, GO_ON = 1, FRAME_DONE = 2 };

/* Receives up to `wanted` bytes to `to` and then, if `ahead`, the next header. Returns the number of bytes, 0 if there are
 * none for now, or -errno. */
static ssize_t receive(zp__connection *c, void *to, size_t wanted, bool ahead)
{
	if (!c->readable && !c->records)
		return 0;
	struct iovec iov[2] = {{to, wanted}};
	if (ahead) {
		uint8_t *space;
		iov[1].iov_len = zp__frame_missing(&c->rx.parser, &space);
		iov[1].iov_base = space;
		wanted += iov[1].iov_len;
	}
	if (c->records)
		return zp__record_receive(c, iov, ahead ? 2 : 1);
	ssize_t n = zp__connection_receive(c, iov, ahead ? 2 : 1);
	if (n == -EAGAIN || n == -EWOULDBLOCK) {
		c->readable = false;
		return 0;
	}
	/* After a short count the socket is empty, and new bytes trigger a new edge. After a hang-up there is none. */
	if (n > 0 && (size_t)n < wanted && !c->hung_up)
		c->readable = false;
	return n;
}

static int header_step(zp__connection *c)
{
	uint8_t *space;
	size_t missing = zp__frame_missing(&c->rx.parser, &space);
	ssize_t n = missing ? receive(c, space, missing, false) : 0;
	if (n < 0 || (n == 0 && missing))
		return (int)n;
	int rc = zp__frame_advance(&c->rx.parser, (size_t)n, &c->rx.frame);
	if (rc > 0)
		c->rx.stage = ZP__RX_ADMIT;
	if (n > 0) {
		pthread_mutex_lock(&c->link->engine->mutex);
		c->rx_bytes += (uint64_t)n;
		pthread_mutex_unlock(&c->link->engine->mutex);
	}
	return rc < 0 ? rc : GO_ON;
}

static enum zp__verdict admit(zp__connection *c)
{
	switch (c->rx.frame.kind) {
	case ZP__MESSAGE:
		return zp__message_admit(c);
	case ZP__OPENED:
		return zp__opened_admit(c);
	case ZP__STARTED:
		return zp__started_admit(c);
	case ZP__FINAL_ACK:
	case ZP__ACK:
		return zp__retransmit_admit(c);
	default:
		return zp__attempt_is_known(c->link->engine, c->rx.frame.id) ? zp__attempt_admit(&c->rx) : zp__early_admit(c);
	}
}

static int admit_step(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	zp__receive *rx = &c->rx;
	pthread_mutex_lock(&engine->mutex);
	rx->have = 0;
	rx->so_far = (zp__checksum){.bytes = 0};
	bool parked = !zp__list_empty(&c->parked_node);
	enum zp__verdict verdict = parked ? ZP__PARK : admit(c);
	zp__attempt *attempt = rx->attempt;
	if (verdict == ZP__ADMIT)
		rx->stage = ZP__RX_BODY;
	else if (verdict == ZP__DROP)
		rx->stage = ZP__RX_DRAIN;
	else if (verdict == ZP__PARK && !parked && !c->closing)
		zp__list_append(&engine->parked, &c->parked_node);
	pthread_mutex_unlock(&engine->mutex);
	if (verdict == ZP__VIOLATION)
		return -EPROTO;
	if (verdict == ZP__NO_MEMORY)
		return -ENOMEM;
	if (verdict == ZP__PARK)
		return c->hung_up ? -ECONNRESET : NOTHING_MORE;
	if (verdict == ZP__ADMIT && attempt) {
		int rc = attempt->algorithm->make_room(rx);
		pthread_mutex_lock(&engine->mutex);
		zp__attempt_unpin(engine, attempt);
		pthread_mutex_unlock(&engine->mutex);
		if (rc < 0)
			return rc;
	}
	return GO_ON;
}

static int drain_step(zp__connection *c)
{
	zp__receive *rx = &c->rx;
	size_t rest = rx->frame.length - rx->have;
	if (rest) {
		bool last = rest <= ZP__SCRATCH_BYTES;
		ssize_t n = receive(c, c->thread->scratch, last ? rest : ZP__SCRATCH_BYTES, last);
		if (n <= 0)
			return (int)n;
		size_t taken = (size_t)n < rest ? (size_t)n : rest;
		rx->have += (uint32_t)taken;
		rx->parser.have += (uint32_t)((size_t)n - taken);
		pthread_mutex_lock(&c->link->engine->mutex);
		c->rx_bytes += (uint64_t)n;
		pthread_mutex_unlock(&c->link->engine->mutex);
	}
	if (rx->have < rx->frame.length)
		return GO_ON;
	pthread_mutex_lock(&c->link->engine->mutex);
	rx->stage = ZP__RX_HEADER;
	zp__retransmit_received(c);
	pthread_mutex_unlock(&c->link->engine->mutex);
	return FRAME_DONE;
}

/* Lock held. Accounts for `n` bytes, of which `taken` belong to the body and the rest to the next header. */
static void body_account(zp__connection *c, size_t n, size_t taken)
{
	zp__receive *rx = &c->rx;
	if (rx->attempt && rx->have == 0)
		rx->attempt->rx_bytes += ZP__HEADER_BYTES;
	rx->have += (uint32_t)taken;
	rx->parser.have += (uint32_t)(n - taken);
	c->rx_bytes += n;
	if (rx->attempt) {
		rx->attempt->rx_bytes += taken;
		c->link->moved_bytes += taken;
	} else {
		rx->due_ns = zp__now_ns() + zp__stall_timeout_ns(c->link->engine);
	}
}

/* Encryption verifies the bytes, so the checksum is computed only if it may go into the digest of a result. */
static bool needs_checksum(const zp__connection *c)
{
	return !c->records || (c->rx.frame.kind != ZP__MESSAGE && c->rx.frame.kind != ZP__REDUCE_SCATTER);
}

/* Receives more of a body, without the lock; its attempt is pinned. The checksum takes bytes while they are in the cache. */
static int body_receive(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	zp__receive *rx = &c->rx;
	size_t rest = rx->frame.length - rx->have, taken = 0;
	ssize_t n = 0; /* An empty body is also accounted for. */
	if (rest) {
		uint8_t *to = rx->body + rx->have;
		bool last = rest <= ZP__RECEIVE_BYTES;
		size_t wanted = last ? rest : ZP__RECEIVE_BYTES;
		n = receive(c, to, wanted, last);
		if (n <= 0)
			return (int)n;
		taken = (size_t)n < wanted ? (size_t)n : wanted;
		if (needs_checksum(c))
			zp__checksum_advance(&rx->so_far, rx->body, rx->have + taken);
	}
	pthread_mutex_lock(&engine->mutex);
	body_account(c, (size_t)n, taken);
	pthread_mutex_unlock(&engine->mutex);
	if (taken < rest)
		return GO_ON;
	if (needs_checksum(c))
		rx->checksum = zp__checksum_finish(&rx->so_far, rx->body, rx->frame.length);
	if (!c->records && (uint32_t)rx->checksum != rx->frame.checksum)
		return -EBADMSG;
	if (rx->attempt)
		rx->attempt->algorithm->landed(rx);
	return FRAME_DONE;
}

static int body_step(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	zp__receive *rx = &c->rx;
	pthread_mutex_lock(&engine->mutex);
	if (rx->attempt && rx->attempt->status < 0)
		rx->attempt = NULL;
	zp__attempt *attempt = rx->attempt;
	bool early = rx->message && rx->frame.kind != ZP__MESSAGE;
	if (attempt)
		attempt->pins++;
	else if (!rx->message) /* Its attempt has failed or ended. */
		rx->stage = ZP__RX_DRAIN;
	pthread_mutex_unlock(&engine->mutex);
	if (rx->stage == ZP__RX_DRAIN)
		return GO_ON;

	int rc = body_receive(c);

	if (!attempt && rc != FRAME_DONE)
		return rc;
	pthread_mutex_lock(&engine->mutex);
	if (rc == FRAME_DONE) {
		if (attempt)
			zp__attempt_moved(attempt, c->link);
		else
			zp__message_landed(c);
		rx->attempt = NULL;
		rx->stage = ZP__RX_HEADER;
		zp__retransmit_received(c);
	}
	if (attempt)
		zp__attempt_unpin(engine, attempt);
	pthread_mutex_unlock(&engine->mutex);
	if (early)
		zp__early_replay(engine, rx->frame.id); /* The attempt may have begun meanwhile. */
	return rc;
}

int zp__receive_turn(zp__connection *c)
{
	for (uint32_t step = 0; step < ZP__TURN_STEPS; step++) {
		int rc = 0;
		switch (c->rx.stage) {
		case ZP__RX_HEADER:
			rc = header_step(c);
			break;
		case ZP__RX_ADMIT:
			rc = admit_step(c);
			break;
		case ZP__RX_BODY:
			rc = body_step(c);
			break;
		case ZP__RX_DRAIN:
			rc = drain_step(c);
			break;
		}
		if (rc == FRAME_DONE)
			return 1;
		if (rc <= 0)
			return rc;
	}
	return 1;
}
