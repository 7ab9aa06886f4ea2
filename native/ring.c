/* The ring of one attempt, cut through: a frame is reduced and forwarded as soon as it has come.
 *
 * Chunk j travels j -> j+1 -> ... -> j-1, gathering shares (reduce-scatter); rank j-1, the last to add its share, owns
 * the result and sends it j-1 -> j -> ... -> j-2 (all-gather). Each hop of one frame is one slot's worth of work:
 *
 *   mode              | a reduce-scatter frame lands and is summed  | forwarded from | an all-gather frame lands
 *   out of place      | in the output, the input is added           | there          | in the output
 *   in place          | in a buffer of the connection, the sum goes | the output     | in the output
 *                     | to the output                               |                |
 *   quantised         | in the wire buffer, folded there            | there          | in the wire buffer, forwarded
 *                     |                                             |                | from there, result to the output
 *   scatter           | in the workspace, or if we own the chunk in | there          | -
 *                     | the output; the input is added              |                |
 *
 * An all-reduce is both halves. A reduce-scatter is the first alone: what an owner has is its result. An all-gather and
 * a broadcast are the second alone: a chunk begins as its owner's input, copied to the output just before it is sent.
 * In those the plan says who owns which chunk, so that rows and parts need not be in the order of the ring.
 *
 * In place with restore, the old bytes of the output go to the workspace before anything is written over them, when
 * the frame is in the cache anyhow: those of our own chunk when it is sent, others when our share is added. Quantised,
 * it is when the result is there; in a broadcast, before a frame lands.
 *
 * Memory beyond the caller's: in place, one frame a connection, and with restore the size of the tensor; quantised,
 * what the whole tensor takes on the wire, about 1/4 of FLOAT, 1/2 of the 16-bit types and 1/8 of DOUBLE (and, in place
 * with restore, the workspace too); scatter, what passes through, (N-2)/N of the tensor.
 *
 * A place is written by its second frame (all-gather) only when its first (reduce-scatter) has left: it travels around
 * the ring in between. A frame that comes before that waits, which only a broken peer or a scheduling race of
 * microseconds causes; so a read never waits for a write of the network and the ring cannot deadlock.
 *
 * The functions that are called "pinned" work on the memory of slots without the lock: a slot is of one thread at a
 * time, from admission to zp__link_offer() and from frame_take() to ring_sent(). */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "buffers.h"

static bool owns(const zp__attempt *attempt, uint32_t chunk)
{
	return zp__chunk_owner(&attempt->layout, chunk) == attempt->layout.rank;
}

/* Where partial sums are made, and forwarded from. */
static uint8_t *partial_at(const zp__attempt *attempt, const zp__place *place)
{
	bool aside = attempt->mode == ZP__SCATTER && !owns(attempt, place->chunk);
	return aside ? workspace_at(attempt, place) : output_at(attempt, place);
}

static uint8_t *wire_at(const zp__attempt *attempt, const zp__slot *slot)
{
	return attempt->wire.memory + slot_index(attempt, slot) * attempt->layout.wire_stride;
}

/* The rank before the owner, the last to get the result, does not forward it. */
static bool forwards_result(const zp__layout *l, uint32_t chunk)
{
	return zp__chunk_owner(l, chunk) != (l->rank + 1) % l->world_size;
}

/* Counts what is to come and to go, and queues our own chunk. */
static void ring_start(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	for (uint32_t chunk = 0; chunk < l->chunks; chunk++) {
		uint64_t slots = zp__chunk_slots(l, chunk);
		bool owned = owns(attempt, chunk), starts = l->reduces ? zp__chunk_start(l, chunk) == l->rank : owned;
		bool passes_on = l->gathers && forwards_result(l, chunk);
		attempt->rx_remaining += slots * (uint64_t)((l->reduces && !starts) + (l->gathers && !owned));
		attempt->tx_remaining += slots * (uint64_t)((l->reduces && !owned) + passes_on);
		if (!starts && !owned && l->reduces)
			continue;
		zp__slot *slot = attempt->slots + zp__chunk_first_slot(l, chunk);
		for (uint64_t i = 0; i < slots; i++, slot++) {
			slot->flags = !l->reduces ? ZP__SLOT_REDUCED | ZP__SLOT_SENT
				      : starts	  ? ZP__SLOT_REDUCED
						  : ZP__SLOT_SENT;
			slot->kind = l->reduces ? ZP__REDUCE_SCATTER : ZP__ALL_GATHER;
			if (starts)
				zp__link_offer(attempt->next, attempt->flow, &slot->node);
		}
	}
}

static enum zp__verdict slot_admit(const zp__attempt *attempt, zp__slot *slot, const zp__frame *frame)
{
	const zp__layout *l = &attempt->layout;
	if (frame->kind == ZP__REDUCE_SCATTER) {
		bool is_own = zp__chunk_start(l, frame->chunk) == l->rank;
		if (is_own || slot->flags & (ZP__SLOT_ARRIVING | ZP__SLOT_REDUCED))
			return ZP__VIOLATION;
		slot->flags |= ZP__SLOT_ARRIVING;
		return ZP__ADMIT;
	}
	if (!l->gathers || owns(attempt, frame->chunk) || slot->flags & ZP__SLOT_LANDING)
		return ZP__VIOLATION;
	if (!(slot->flags & ZP__SLOT_REDUCED))
		return ZP__VIOLATION;
	if (!(slot->flags & ZP__SLOT_SENT))
		return ZP__PARK;
	zp__list_remove(&slot->node); /* Our share is in this result, so the frame that we sent has arrived. */
	slot->flags |= ZP__SLOT_LANDING;
	return ZP__ADMIT;
}

/* NULL: in the connection's own buffer. */
static uint8_t *landing_of(const zp__attempt *attempt, const zp__slot *slot, uint8_t kind)
{
	zp__place place = zp__slot_place(&attempt->layout, slot_index(attempt, slot));
	if (attempt->quantised)
		return wire_at(attempt, slot);
	if (kind == ZP__ALL_GATHER || attempt->mode == ZP__OUT_OF_PLACE)
		return output_at(attempt, &place);
	return attempt->mode == ZP__SCATTER ? partial_at(attempt, &place) : NULL;
}

static enum zp__verdict ring_admit(zp__attempt *attempt, zp__connection *c)
{
	const zp__frame *frame = &c->rx.frame;
	if (c->link != attempt->previous)
		return ZP__VIOLATION;
	zp__slot *slot = slot_of(attempt, frame);
	if (!slot)
		return ZP__VIOLATION;
	enum zp__verdict verdict = slot_admit(attempt, slot, frame);
	if (verdict != ZP__ADMIT)
		return verdict;
	c->rx.slot = slot;
	c->rx.body = landing_of(attempt, slot, frame->kind);
	return ZP__ADMIT;
}

/* Makes a place for an admitted frame that has none, or one ready whose old bytes nothing has saved yet. -ENOMEM. */
static int ring_make_room(zp__connection *c)
{
	zp__attempt *attempt = c->rx.attempt;
	if (c->rx.body) {
		if (!attempt->layout.reduces && attempt->mode == ZP__IN_PLACE_RESTORE) {
			zp__place place = zp__slot_place(&attempt->layout, slot_index(attempt, c->rx.slot));
			save(attempt, c->rx.slot, &place);
		}
		return 0;
	}
	if (c->landing_bytes < c->rx.frame.length) {
		zp__memory_unmap(c->landing, c->landing_bytes);
		c->landing_bytes = attempt->layout.wire_stride;
		c->landing = zp__memory_map(c->landing_bytes);
		if (!c->landing) {
			c->landing_bytes = 0;
			return -ENOMEM;
		}
	}
	c->rx.body = c->landing;
	return 0;
}

/* Adds our share to a frame that landed, in pieces that stay in the cache: the old bytes are saved, the sum is made,
 * by the owner finished, and checksummed. It ends up in the output. Returns the CRC of what is to be forwarded, or 0 if
 * nobody needs it. */
static uint32_t share_add(zp__attempt *attempt, zp__slot *slot, const zp__place *place, const uint8_t *landed,
			  bool owned)
{
	const zp_reduce_plan *plan = &attempt->plan;
	const zp__reduce_kernels *kernels = zp__reduce_kernels_of(zp__isa_best());
	size_t bytes = place->elements * attempt->layout.itemsize, n;
	bool saves = attempt->mode == ZP__IN_PLACE_RESTORE;
	bool checks = owned ? attempt->layout.gathers : !attempt->next->sealed;
	uint32_t crc = 0;
	for (size_t done = 0; done < bytes; done += n) {
		n = bytes - done < ZP__PIECE_BYTES ? bytes - done : ZP__PIECE_BYTES;
		uint64_t elements = n / attempt->layout.itemsize;
		uint8_t *sum = partial_at(attempt, place) + done;
		if (saves)
			zp__copy_past_cache(workspace_at(attempt, place) + done, sum, n);
		kernels->reduce[plan->dtype][plan->op](sum, landed + done, input_at(attempt, place) + done, elements);
		if (owned && plan->op == ZP_AVG)
			kernels->divide[plan->dtype](sum, elements, plan->world_size);
		if (checks)
			crc = zp__crc32c(crc, sum, n);
	}
	if (saves) {
		zp__copy_past_cache_done();
		mark(attempt, slot, ZP__SLOT_SAVED);
	}
	return crc;
}

static void share_landed(zp__connection *c, zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	bool owned = owns(attempt, place->chunk), forwards = !owned || attempt->layout.gathers;
	uint32_t crc, result_crc; /* crc: of what is forwarded over a link that is not sealed */
	if (attempt->quantised) {
		zp__quantiser how = quantiser_of(&attempt->plan);
		uint32_t divisor = owned && attempt->plan.op == ZP_AVG ? attempt->plan.world_size : 1;
		zp__quantise_fold(zp__isa_best(), &how, c->rx.body, input_at(attempt, place), place->elements, divisor);
		crc = attempt->next->sealed ? 0 : zp__crc32c(0, c->rx.body, c->rx.frame.length);
		result_crc = owned ? result_dequantise(attempt, slot, place, c->rx.body) : 0;
	} else {
		crc = result_crc = share_add(attempt, slot, place, c->rx.body, owned);
	}
	zp_engine *engine = c->link->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->crc = crc;
	slot->kind = owned ? ZP__ALL_GATHER : ZP__REDUCE_SCATTER;
	slot->flags |= ZP__SLOT_REDUCED | (owned ? ZP__SLOT_LANDING | ZP__SLOT_RESULT : 0);
	if (owned && forwards)
		attempt->digest += zp__digest_share(slot_index(attempt, slot), result_crc);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending && forwards)
		zp__link_offer(attempt->next, attempt->flow, &slot->node);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&engine->mutex);
}

static void result_landed(zp__connection *c, zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	uint32_t result_crc = attempt->quantised ? result_dequantise(attempt, slot, place, c->rx.body) : c->rx.crc;
	zp_engine *engine = c->link->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->crc = c->rx.crc;
	slot->kind = ZP__ALL_GATHER;
	slot->flags |= ZP__SLOT_RESULT;
	attempt->digest += zp__digest_share(slot_index(attempt, slot), result_crc);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending && forwards_result(&attempt->layout, place->chunk))
		zp__link_offer(attempt->next, attempt->flow, &slot->node);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&engine->mutex);
}

/* A frame is complete and its CRC is right. */
static void ring_landed(zp__connection *c)
{
	zp__attempt *attempt = c->rx.attempt;
	zp__slot *slot = c->rx.slot;
	zp__place place = zp__slot_place(&attempt->layout, slot_index(attempt, slot));
	if (c->rx.frame.kind == ZP__REDUCE_SCATTER)
		share_landed(c, attempt, slot, &place);
	else
		result_landed(c, attempt, slot, &place);
}

static const uint8_t *body_of(const zp__attempt *attempt, const zp__slot *slot, const zp__place *place)
{
	if (attempt->quantised)
		return wire_at(attempt, slot);
	if (slot->kind == ZP__ALL_GATHER)
		return output_at(attempt, place);
	bool starts = zp__chunk_start(&attempt->layout, place->chunk) == attempt->layout.rank;
	return starts ? input_at(attempt, place) : partial_at(attempt, place);
}

/* The CRC of a frame of our own chunk, or 0 if it leaves over a sealed link; what will be written over is saved while it
 * is in the cache. */
static uint32_t own_check(zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	const uint8_t *body = input_at(attempt, place);
	size_t bytes = place->elements * attempt->layout.itemsize, n;
	bool checks = !attempt->next->sealed;
	if (attempt->mode != ZP__IN_PLACE_RESTORE)
		return checks ? zp__crc32c(0, body, bytes) : 0;
	uint32_t crc = 0;
	for (size_t done = 0; done < bytes; done += n) {
		n = bytes - done < ZP__PIECE_BYTES ? bytes - done : ZP__PIECE_BYTES;
		if (checks)
			crc = zp__crc32c(crc, body + done, n);
		zp__copy_past_cache(workspace_at(attempt, place) + done, body + done, n);
	}
	zp__copy_past_cache_done();
	mark(attempt, slot, ZP__SLOT_SAVED);
	return crc;
}

/* Makes a result of our input, where nothing is reduced: once, whoever sends it how often. */
static void own_result_make(zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	size_t bytes = place->elements * attempt->layout.itemsize;
	uint8_t *to = output_at(attempt, place);
	const uint8_t *from = (const uint8_t *)attempt->plan.input + place->offset * attempt->layout.itemsize;
	if (to != from)
		memcpy(to, from, bytes);
	uint32_t crc = zp__crc32c(0, to, bytes);
	zp_engine *engine = attempt->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->crc = crc;
	if (!(slot->flags & ZP__SLOT_RESULT))
		attempt->digest += zp__digest_share(slot_index(attempt, slot), crc);
	slot->flags |= ZP__SLOT_RESULT;
	pthread_mutex_unlock(&engine->mutex);
}

/* Makes the header and body of the frame in c->tx. The frames of our own chunk are quantised and checksummed here, by
 * the connection that sends them, just before. */
static void ring_prepare(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	zp__attempt *attempt = tx->attempt;
	zp__slot *slot = tx->slot;
	const zp__layout *l = &attempt->layout;
	zp__place place = zp__slot_place(l, slot_index(attempt, slot));
	const uint8_t *body = body_of(attempt, slot, &place);
	if (!l->reduces && owns(attempt, place.chunk))
		own_result_make(attempt, slot, &place);
	if (slot->kind == ZP__REDUCE_SCATTER && zp__chunk_start(l, place.chunk) == l->rank) {
		if (attempt->quantised) {
			zp__quantiser how = quantiser_of(&attempt->plan);
			zp__quantise(zp__isa_best(), &how, wire_at(attempt, slot), input_at(attempt, &place),
				     place.elements);
			slot->crc = c->seal ? 0 : zp__crc32c(0, body, zp__wire_bytes(l, place.elements));
		} else {
			slot->crc = own_check(attempt, slot, &place);
		}
	}
	frame_fill(tx, &place, body);
}

/* A frame has left. */
static void ring_sent(zp__attempt *attempt, zp__slot *slot)
{
	attempt->tx_remaining--;
	if (slot->kind == ZP__REDUCE_SCATTER) {
		slot->flags |= ZP__SLOT_SENT;
		link_unpark(attempt, attempt->previous);
	}
	zp__attempt_progress(attempt);
}

/* A frame has left, and is to be sent again. */
static void ring_unsent(zp__attempt *attempt, zp__slot *slot)
{
	attempt->tx_remaining++;
	if (slot->kind == ZP__REDUCE_SCATTER)
		slot->flags &= (uint8_t)~ZP__SLOT_SENT;
}

/* The connection was lost in the middle of a frame: it will come again. */
static void ring_cut(zp__connection *c)
{
	c->rx.slot->flags &= (uint8_t)~(c->rx.frame.kind == ZP__REDUCE_SCATTER ? ZP__SLOT_ARRIVING : ZP__SLOT_LANDING);
}

/* What a ring needs beside the workspace: see the table above. */
static int ring_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	return zp__region_take(attempt->engine, attempt->quantised ? l->slot_count * l->wire_stride : 0, &attempt->wire);
}

const zp__algorithm zp__ring = {.allocate = ring_allocate,
				.start = ring_start,
				.admit = ring_admit,
				.make_room = ring_make_room,
				.landed = ring_landed,
				.prepare = ring_prepare,
				.sent = ring_sent,
				.unsent = ring_unsent,
				.cut = ring_cut};
