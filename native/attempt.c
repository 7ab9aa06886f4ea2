/* Attempts: start, failure, stall, end.
 *
 *   zp_reduce_start            all frames sent and received          zp_reduce_end
 *  ----------------> running ------------------------------> done ---------------------> freed
 *                       |                                                                ^
 *                       +--- link lost, stall --> failed --------------------------------+
 *                       +----------------------------------------------------------------+
 *
 * An attempt is in the table of attempts from start to end. Its memory and the caller's are touched by threads that
 * hold a pin, and, once `ending` is set and no pins are left, by the thread in zp_reduce_end() alone. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "quantise.h"
#include "reduce.h"
#include "zp_internal.h"

zp__attempt *zp__attempt_find(zp_engine *engine, uint64_t id)
{
	ZP__EACH(node, &engine->attempts[id % ZP__ATTEMPT_BUCKETS])
	{
		zp__attempt *attempt = ZP__ELEMENT(node, zp__attempt, node);
		if (attempt->plan.attempt == id)
			return attempt;
	}
	return NULL;
}

static bool overlap(const void *a, const void *b, uint64_t bytes)
{
	uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
	return x < y ? y - x < bytes : x - y < bytes;
}

static int plan_check(const zp_reduce_plan *p)
{
	if (p->dtype >= ZP__DTYPES || p->op >= ZP__OPS || p->quantization > ZP_QUANTIZE_ZERO_POINT_SCALE)
		return -EINVAL;
	if (p->world_size < 2 || p->world_size > ZP__WORLD_SIZE_MAX || p->rank >= p->world_size)
		return -EINVAL;
	if (p->frame_bytes < ZP__FRAME_BYTES_MIN || p->frame_bytes > ZP__FRAME_BYTES_MAX)
		return -EINVAL;
	if (p->count < 1 || p->count > ZP__ELEMENTS_MAX || !p->input || !p->output)
		return -EINVAL;
	if (p->input != p->output && overlap(p->input, p->output, p->count * zp__itemsize[p->dtype]))
		return -EINVAL;
	if (p->quantization == ZP_QUANTIZE_NONE)
		return 0;
	if (p->dtype < ZP_FLOAT16 || p->block_elements < ZP__BLOCK_ELEMENTS_MIN ||
	    p->block_elements > ZP__BLOCK_ELEMENTS_MAX)
		return -EINVAL;
	return 0;
}

static int layout_make(const zp_reduce_plan *p, zp__layout *l)
{
	*l = (zp__layout){.world_size = p->world_size, .rank = p->rank, .itemsize = zp__itemsize[p->dtype]};
	l->chunk_elements = p->count / p->world_size;
	l->long_chunks = p->count % p->world_size;
	uint64_t longest = l->chunk_elements + (l->long_chunks > 0);
	l->frame_elements = p->frame_bytes / l->itemsize;
	if (l->frame_elements > longest)
		l->frame_elements = longest;
	if (p->quantization != ZP_QUANTIZE_NONE) {
		l->block_elements = p->block_elements;
		l->parameter_bytes = zp__quantise_parameter_bytes(p->dtype);
		l->frame_elements -= l->frame_elements % l->block_elements;
		if (l->frame_elements == 0)
			l->frame_elements = l->block_elements;
	}
	l->wire_stride = zp__wire_bytes(l, l->frame_elements);
	l->long_slots = (l->chunk_elements + 1 + l->frame_elements - 1) / l->frame_elements;
	l->short_slots = (l->chunk_elements + l->frame_elements - 1) / l->frame_elements;
	l->slot_count = l->long_chunks * l->long_slots + (p->world_size - l->long_chunks) * l->short_slots;
	return l->slot_count > ZP__SLOTS_MAX ? -EINVAL : 0;
}

static void attempt_free(zp__attempt *attempt)
{
	zp__memory_unmap(attempt->workspace, attempt->workspace_bytes);
	zp__memory_unmap(attempt->wire, attempt->wire_bytes);
	zp__memory_unmap(attempt->landing, attempt->landing_bytes);
	free(attempt->slots);
	free(attempt);
}

static bool map(uint8_t **memory, size_t *bytes, size_t wanted)
{
	*bytes = wanted;
	*memory = wanted ? zp__memory_map(wanted) : NULL;
	return *memory || !wanted;
}

static int attempt_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	attempt->slots = calloc(l->slot_count, sizeof *attempt->slots);
	if (!attempt->slots)
		return -ENOMEM;
	for (uint64_t i = 0; i < l->slot_count; i++)
		zp__list_init(&attempt->slots[i].node);
	bool restore = attempt->mode == ZP__IN_PLACE_RESTORE;
	bool landing = attempt->mode == ZP__IN_PLACE && !attempt->quantised;
	bool ok = map(&attempt->workspace, &attempt->workspace_bytes,
		      restore ? attempt->plan.count * l->itemsize : 0) &&
		  map(&attempt->wire, &attempt->wire_bytes, attempt->quantised ? l->slot_count * l->wire_stride : 0) &&
		  map(&attempt->landing, &attempt->landing_bytes,
		      landing ? ZP_LINK_CONNECTIONS_MAX * l->wire_stride : 0);
	return ok ? 0 : -ENOMEM;
}

static int attempt_new(const zp_reduce_plan *plan, zp__attempt **result)
{
	int rc = plan_check(plan);
	if (rc < 0)
		return rc;
	zp__attempt *attempt = calloc(1, sizeof *attempt);
	if (!attempt)
		return -ENOMEM;
	attempt->plan = *plan;
	attempt->quantised = plan->quantization != ZP_QUANTIZE_NONE;
	attempt->mode = plan->input != plan->output ? ZP__OUT_OF_PLACE
			: plan->restore		    ? ZP__IN_PLACE_RESTORE
						    : ZP__IN_PLACE;
	zp__list_init(&attempt->node);
	zp__list_init(&attempt->flow.node);
	zp__list_init(&attempt->flow.frames);
	zp__list_init(&attempt->event.node);
	attempt->flow.attempt = attempt;
	rc = layout_make(plan, &attempt->layout);
	if (rc == 0)
		rc = attempt_allocate(attempt);
	if (rc < 0)
		attempt_free(attempt);
	else
		*result = attempt;
	return rc;
}

int zp_reduce_start(zp_engine *engine, const zp_reduce_plan *plan)
{
	zp__attempt *attempt = NULL;
	int rc = attempt_new(plan, &attempt);
	pthread_mutex_lock(&engine->mutex);
	zp__link *next = NULL, *previous = NULL;
	if (rc == 0) {
		next = zp__link_find(engine, plan->next);
		previous = zp__link_find(engine, plan->previous);
		if (engine->shut_down)
			rc = -ESHUTDOWN;
		else if (zp__attempt_find(engine, plan->attempt))
			rc = -EEXIST;
		else if (!next || !previous)
			rc = -ENOTCONN;
	}
	if (rc == 0) {
		attempt->next = next;
		attempt->previous = previous;
		next->references++;
		previous->references++;
		attempt->moved_ns = zp__now_ns();
		zp__list_append(&engine->attempts[plan->attempt % ZP__ATTEMPT_BUCKETS], &attempt->node);
		engine->attempt_count++;
		zp__ring_start(attempt);
		zp__thread_wake(&engine->threads[0]); /* It watches for stalls. */
	}
	if (rc != -EINVAL && rc != -ESHUTDOWN)
		zp__id_told(engine, plan->attempt);
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0 && attempt)
		attempt_free(attempt);
	return rc;
}

void zp__attempt_unpin(zp_engine *engine, zp__attempt *attempt)
{
	if (--attempt->pins == 0 && attempt->ending)
		pthread_cond_broadcast(&engine->unpinned);
}

static void report(zp__attempt *attempt, int status, const uint8_t *fault)
{
	zp_event *event = &attempt->event.event;
	*event = (zp_event){.kind = ZP_EVENT_REDUCE_DONE,
			    .status = status,
			    .id = attempt->plan.attempt,
			    .digest = attempt->digest,
			    .tx_bytes = attempt->tx_bytes,
			    .rx_bytes = attempt->rx_bytes};
	if (fault)
		memcpy(event->peer, fault, ZP_PEER_ID_BYTES);
	zp__event_push(attempt->next->engine, &attempt->event);
}

/* A frame was sent or received: says so if it was the last. */
void zp__attempt_progress(zp__attempt *attempt)
{
	if (attempt->rx_remaining || attempt->tx_remaining || attempt->done || attempt->status < 0 || attempt->ending)
		return;
	attempt->done = true;
	report(attempt, 0, NULL);
}

/* `fault` may be NULL: nobody is known to be at fault. */
void zp__attempt_fail(zp__attempt *attempt, int status, const uint8_t *fault)
{
	if (attempt->done || attempt->status < 0 || attempt->ending)
		return;
	attempt->status = status;
	zp__link_retract(&attempt->flow);
	report(attempt, status, fault);
}

void zp__attempts_fail(zp__link *link, int status)
{
	zp_engine *engine = link->engine;
	for (uint32_t i = 0; i < ZP__ATTEMPT_BUCKETS; i++) {
		ZP__EACH(node, &engine->attempts[i])
		{
			zp__attempt *attempt = ZP__ELEMENT(node, zp__attempt, node);
			if (attempt->next == link || attempt->previous == link)
				zp__attempt_fail(attempt, status, link->peer);
		}
	}
}

/* Who holds a stalled attempt up, as far as it can be seen from here: `next` if it does not take what we send, else
 * `previous` if it stopped in the middle of a frame, else nobody that we know of.
 *
 * The link to it stays. If its path were broken, zp__links_check() would have lost it by now: so its other end is
 * there and is stopped, or waits for others, or has not heard of the attempt. A new link would find it as it is, and
 * the other attempts on the old one would be lost. */
static const uint8_t *stall_fault(const zp__attempt *attempt)
{
	if (!zp__list_empty(&attempt->flow.frames))
		return attempt->next->peer;
	for (uint32_t i = 0; i < attempt->next->connection_count; i++) {
		const zp__connection *c = &attempt->next->connections[i];
		if ((c->tx.active && c->tx.attempt == attempt) || (c->fd >= 0 && zp__sock_has_unsent(c->fd)))
			return attempt->next->peer;
	}
	for (uint32_t i = 0; i < attempt->previous->connection_count; i++)
		if (attempt->previous->connections[i].rx.attempt == attempt)
			return attempt->previous->peer;
	return NULL;
}

uint64_t zp__attempts_check(zp_engine *engine, uint64_t now_ns)
{
	uint64_t next_ns = UINT64_MAX, timeout_ns = engine->config.stall_timeout_ms * (uint64_t)1000000;
	for (uint32_t i = 0; engine->attempt_count && i < ZP__ATTEMPT_BUCKETS; i++) {
		ZP__EACH(node, &engine->attempts[i])
		{
			zp__attempt *attempt = ZP__ELEMENT(node, zp__attempt, node);
			if (attempt->done || attempt->status < 0 || attempt->ending)
				continue;
			uint64_t deadline_ns = attempt->moved_ns + timeout_ns;
			if (deadline_ns <= now_ns)
				zp__attempt_fail(attempt, -ETIMEDOUT, stall_fault(attempt));
			else if (deadline_ns < next_ns)
				next_ns = deadline_ns;
		}
	}
	return next_ns;
}

/* Lets the frame that `c` is sending go on from a copy, or forgets it if none of it has left. */
static void transmit_detach(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	if (tx->sent == 0) {
		*tx = (zp__transmit){0};
		zp__connection_attend(c);
		return;
	}
	tx->attempt = NULL;
	tx->slot = NULL;
	uint64_t done = tx->sent > ZP__HEADER_BYTES ? tx->sent - ZP__HEADER_BYTES : 0;
	tx->aside = malloc(tx->length);
	if (!tx->aside) {
		tx->active = false;
		tx->body = NULL;
		zp__link_lose(c->link, -ENOMEM, true);
		return;
	}
	memcpy(tx->aside + done, tx->body + done, tx->length - done);
	tx->body = tx->aside;
}

/* Lock held, no pins. After this no connection knows the attempt. */
static void attempt_detach(zp__attempt *attempt)
{
	for (uint32_t i = 0; i < attempt->next->connection_count; i++) {
		zp__connection *c = &attempt->next->connections[i];
		if (c->tx.active && c->tx.attempt == attempt)
			transmit_detach(c);
	}
	for (uint32_t i = 0; i < attempt->previous->connection_count; i++) {
		zp__connection *c = &attempt->previous->connections[i];
		if (c->rx.attempt != attempt)
			continue;
		c->rx.attempt = NULL;
		c->rx.slot = NULL;
		c->rx.stage = ZP__RX_DRAIN;
	}
}

/* Lock held at entry and at return, not in between. */
static void attempt_end(zp_engine *engine, zp__attempt *attempt, bool restore)
{
	attempt->ending = true;
	zp__link_retract(&attempt->flow);
	zp__event_withdraw(engine, &attempt->event);
	while (attempt->pins)
		pthread_cond_wait(&engine->unpinned, &engine->mutex);
	attempt_detach(attempt);
	pthread_mutex_unlock(&engine->mutex);

	if (restore)
		zp__ring_restore(attempt);

	pthread_mutex_lock(&engine->mutex);
	zp__list_remove(&attempt->node);
	engine->attempt_count--;
	zp__link_release(attempt->next);
	zp__link_release(attempt->previous);
	pthread_cond_broadcast(&engine->unpinned);
}

int zp_reduce_end(zp_engine *engine, uint64_t id, int commit)
{
	pthread_mutex_lock(&engine->mutex);
	engine->waiting++;
	zp__attempt *attempt = zp__attempt_find(engine, id);
	int rc = 0;
	if (commit && (!attempt || !attempt->done || attempt->ending)) {
		rc = -EINVAL;
		attempt = NULL;
	}
	while (attempt && attempt->ending) { /* Another thread ends it. */
		pthread_cond_wait(&engine->unpinned, &engine->mutex);
		attempt = zp__attempt_find(engine, id);
	}
	if (attempt)
		attempt_end(engine, attempt, !commit);
	if (rc == 0)
		zp__id_told(engine, id);
	if (--engine->waiting == 0)
		pthread_cond_broadcast(&engine->room);
	pthread_mutex_unlock(&engine->mutex);
	if (attempt)
		attempt_free(attempt);
	return rc;
}

void zp__attempts_discard(zp_engine *engine)
{
	pthread_mutex_lock(&engine->mutex);
	for (uint32_t i = 0; i < ZP__ATTEMPT_BUCKETS; i++) {
		while (!zp__list_empty(&engine->attempts[i])) {
			zp__attempt *attempt = ZP__ELEMENT(engine->attempts[i].next, zp__attempt, node);
			attempt_end(engine, attempt, true);
			attempt_free(attempt);
		}
	}
	pthread_mutex_unlock(&engine->mutex);
}
