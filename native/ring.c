/* The ring all-reduce of one attempt, cut through: a frame is reduced and forwarded as soon as it has come.
 *
 * Chunk j travels j -> j+1 -> ... -> j-1, gathering shares (reduce-scatter); rank j-1, the last to add its share, owns
 * the result and sends it j-1 -> j -> ... -> j-2 (all-gather). Each hop of one frame is one slot's worth of work:
 *
 *   mode              | a reduce-scatter frame lands and is summed  | forwarded from | an all-gather frame lands
 *   out of place      | in the output, the input is added           | there          | in the output
 *   in place, restore | in the workspace, the output is added       | there          | in the output, whose old bytes
 *                     |                                             |                | went to the workspace before
 *   in place          | in a buffer of the connection, the sum goes | the output     | in the output
 *                     | to the output                               |                |
 *   quantised         | in the wire buffer, folded there            | there          | in the wire buffer, forwarded
 *                     |                                             |                | from there, result to the output
 *
 * Memory beyond the caller's: in place with restore, the size of the tensor; in place, one frame a connection;
 * quantised, what the whole tensor takes on the wire, about 1/4 of FLOAT, 1/2 of the 16-bit types and 1/8 of DOUBLE
 * (and, in place with restore, the workspace too).
 *
 * A place is written by its second frame (all-gather) only when its first (reduce-scatter) has left: it travels around
 * the ring in between. A frame that comes before that waits, which only a broken peer or a scheduling race of
 * microseconds causes; so a read never waits for a write of the network and the ring cannot deadlock.
 *
 * The functions that are called "pinned" work on the memory of slots without the lock: a slot is of one thread at a
 * time, from admission to zp__link_offer() and from frame_take() to zp__ring_sent(). */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "digest.h"
#include "quantise.h"
#include "reduce.h"
#include "zp_internal.h"

#define SWAP_BYTES 4096u

static uint64_t slot_index(const zp__attempt *attempt, const zp__slot *slot)
{
	return (uint64_t)(slot - attempt->slots);
}

static uint8_t *output_at(const zp__attempt *attempt, const zp__place *place)
{
	return (uint8_t *)attempt->plan.output + place->position * attempt->layout.itemsize;
}

static const uint8_t *input_at(const zp__attempt *attempt, const zp__place *place)
{
	return (const uint8_t *)attempt->plan.input + place->position * attempt->layout.itemsize;
}

static uint8_t *workspace_at(const zp__attempt *attempt, const zp__place *place)
{
	return attempt->workspace + place->position * attempt->layout.itemsize;
}

static uint8_t *wire_at(const zp__attempt *attempt, const zp__slot *slot)
{
	return attempt->wire + slot_index(attempt, slot) * attempt->layout.wire_stride;
}

static zp__quantiser quantiser_of(const zp_reduce_plan *plan)
{
	return (zp__quantiser){.algorithm = plan->quantization,
			       .dtype = plan->dtype,
			       .op = plan->op,
			       .block_elements = plan->block_elements};
}

/* The rank before the owner, the last to get the result, does not forward it. */
static bool forwards_result(const zp__layout *l, uint32_t chunk)
{
	return zp__chunk_owner(l, chunk) != (l->rank + 1) % l->world_size;
}

/* Counts what is to come and to go, and queues our own chunk. */
void zp__ring_start(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	for (uint32_t chunk = 0; chunk < l->world_size; chunk++) {
		uint64_t slots = zp__chunk_slots(l, chunk);
		bool starts = chunk == l->rank, owns = zp__chunk_owner(l, chunk) == l->rank;
		attempt->rx_remaining += slots * (uint64_t)(!starts + !owns);
		attempt->tx_remaining += slots * (uint64_t)(!owns + forwards_result(l, chunk));
		if (!starts && !owns)
			continue;
		zp__slot *slot = attempt->slots + zp__chunk_first_slot(l, chunk);
		for (uint64_t i = 0; i < slots; i++, slot++) {
			slot->flags = starts ? ZP__SLOT_REDUCED : ZP__SLOT_SENT;
			slot->kind = ZP__REDUCE_SCATTER;
			if (starts)
				zp__link_offer(attempt->next, &attempt->flow, &slot->node);
		}
	}
}

/* The slot that a frame is for, if it is of the plan: in a chunk, at a multiple of the frame size, of its length. */
static zp__slot *slot_of(const zp__attempt *attempt, const zp__frame *frame)
{
	const zp__layout *l = &attempt->layout;
	if (frame->lane != 0 || frame->chunk >= l->world_size)
		return NULL;
	if (frame->offset >= zp__chunk_elements(l, frame->chunk) || frame->offset % l->frame_elements)
		return NULL;
	uint64_t index = zp__chunk_first_slot(l, frame->chunk) + frame->offset / l->frame_elements;
	zp__place place = zp__slot_place(l, index);
	assert(place.chunk == frame->chunk && place.offset == frame->offset);
	return frame->length == zp__wire_bytes(l, place.elements) ? &attempt->slots[index] : NULL;
}

static enum zp__verdict slot_admit(const zp__attempt *attempt, zp__slot *slot, const zp__frame *frame)
{
	const zp__layout *l = &attempt->layout;
	if (frame->kind == ZP__REDUCE_SCATTER) {
		if (frame->chunk == l->rank || slot->flags & (ZP__SLOT_ARRIVING | ZP__SLOT_REDUCED))
			return ZP__VIOLATION;
		slot->flags |= ZP__SLOT_ARRIVING;
		return ZP__ADMIT;
	}
	if (zp__chunk_owner(l, frame->chunk) == l->rank || slot->flags & ZP__SLOT_LANDING)
		return ZP__VIOLATION;
	if (!(slot->flags & ZP__SLOT_REDUCED))
		return ZP__VIOLATION;
	if (!(slot->flags & ZP__SLOT_SENT))
		return ZP__PARK;
	slot->flags |= ZP__SLOT_LANDING;
	return ZP__ADMIT;
}

static uint8_t *landing_of(const zp__attempt *attempt, const zp__slot *slot, uint8_t kind, uint32_t connection)
{
	zp__place place = zp__slot_place(&attempt->layout, slot_index(attempt, slot));
	if (attempt->quantised)
		return wire_at(attempt, slot);
	if (kind == ZP__ALL_GATHER || attempt->mode == ZP__OUT_OF_PLACE)
		return output_at(attempt, &place);
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		return workspace_at(attempt, &place);
	return attempt->landing + connection * attempt->layout.wire_stride;
}

enum zp__verdict zp__ring_admit(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	const zp__frame *frame = &c->rx.frame;
	zp__attempt *attempt = zp__attempt_find(engine, frame->id);
	if (!attempt && frame->id > engine->id_known_max)
		return ZP__PARK;
	if (!attempt || attempt->status < 0 || attempt->ending)
		return ZP__DROP;
	if (c->link != attempt->previous)
		return ZP__VIOLATION;
	zp__slot *slot = slot_of(attempt, frame);
	if (!slot)
		return ZP__VIOLATION;
	enum zp__verdict verdict = slot_admit(attempt, slot, frame);
	if (verdict != ZP__ADMIT)
		return verdict;
	c->rx.attempt = attempt;
	c->rx.slot = slot;
	c->rx.body = landing_of(attempt, slot, frame->kind, c->index);
	attempt->pins++;
	return ZP__ADMIT;
}

static void mark(zp__attempt *attempt, zp__slot *slot, uint8_t flags)
{
	zp_engine *engine = attempt->next->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->flags |= flags;
	pthread_mutex_unlock(&engine->mutex);
}

/* Saves the old bytes of the output before it is written. */
static void save(zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	memcpy(workspace_at(attempt, place), output_at(attempt, place), place->elements * attempt->layout.itemsize);
	mark(attempt, slot, ZP__SLOT_SAVED);
}

/* Makes the place of an admitted frame ready to be written. */
void zp__ring_make_room(zp__connection *c)
{
	zp__attempt *attempt = c->rx.attempt;
	if (c->rx.frame.kind != ZP__ALL_GATHER || attempt->mode != ZP__IN_PLACE_RESTORE || attempt->quantised)
		return;
	zp__place place = zp__slot_place(&attempt->layout, slot_index(attempt, c->rx.slot));
	save(attempt, c->rx.slot, &place);
}

static void swap(uint8_t *a, uint8_t *b, size_t bytes)
{
	uint8_t piece[SWAP_BYTES];
	while (bytes) {
		size_t n = bytes < sizeof piece ? bytes : sizeof piece;
		memcpy(piece, a, n);
		memcpy(a, b, n);
		memcpy(b, piece, n);
		a += n;
		b += n;
		bytes -= n;
	}
}

/* Adds our share to a frame that landed. The owner also finishes it, so that the result is in the output. Returns the
 * CRC of what is to be forwarded. */
static uint32_t share_add(zp__attempt *attempt, zp__slot *slot, const zp__place *place, uint8_t *landed, bool owns)
{
	const zp_reduce_plan *plan = &attempt->plan;
	const zp__reduce_kernels *kernels = zp__reduce_kernels_of(zp__isa_best());
	uint8_t *sum = attempt->mode == ZP__IN_PLACE ? output_at(attempt, place) : landed;
	size_t bytes = place->elements * attempt->layout.itemsize;
	kernels->reduce[plan->dtype][plan->op](sum, landed, input_at(attempt, place), place->elements);
	if (owns && plan->op == ZP_AVG)
		kernels->divide[plan->dtype](sum, place->elements, plan->world_size);
	if (owns && attempt->mode == ZP__IN_PLACE_RESTORE) {
		swap(sum, output_at(attempt, place), bytes);
		mark(attempt, slot, ZP__SLOT_SAVED);
		sum = output_at(attempt, place);
	}
	return zp__crc32c(0, sum, bytes);
}

/* Puts the result that the wire buffer holds in the output. Returns the CRC of the output's bytes. */
static uint32_t result_dequantise(zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	zp__quantiser how = quantiser_of(&attempt->plan);
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, place);
	zp__dequantise(zp__isa_best(), &how, output_at(attempt, place), wire_at(attempt, slot), place->elements);
	return zp__crc32c(0, output_at(attempt, place), place->elements * attempt->layout.itemsize);
}

static void share_landed(zp__connection *c, zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	bool owns = zp__chunk_owner(&attempt->layout, place->chunk) == attempt->layout.rank;
	uint32_t crc, result_crc;
	if (attempt->quantised) {
		zp__quantiser how = quantiser_of(&attempt->plan);
		uint32_t divisor = owns && attempt->plan.op == ZP_AVG ? attempt->plan.world_size : 1;
		zp__quantise_fold(zp__isa_best(), &how, c->rx.body, input_at(attempt, place), place->elements, divisor);
		crc = zp__crc32c(0, c->rx.body, c->rx.frame.length);
		result_crc = owns ? result_dequantise(attempt, slot, place) : 0;
	} else {
		crc = result_crc = share_add(attempt, slot, place, c->rx.body, owns);
	}
	zp_engine *engine = c->link->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->crc = crc;
	slot->kind = owns ? ZP__ALL_GATHER : ZP__REDUCE_SCATTER;
	slot->flags |= ZP__SLOT_REDUCED | (owns ? ZP__SLOT_LANDING | ZP__SLOT_RESULT : 0);
	if (owns)
		attempt->digest += zp__digest_share(slot_index(attempt, slot), result_crc);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending)
		zp__link_offer(attempt->next, &attempt->flow, &slot->node);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&engine->mutex);
}

static void result_landed(zp__connection *c, zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	uint32_t result_crc = attempt->quantised ? result_dequantise(attempt, slot, place) : c->rx.crc;
	zp_engine *engine = c->link->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->crc = c->rx.crc;
	slot->kind = ZP__ALL_GATHER;
	slot->flags |= ZP__SLOT_RESULT;
	attempt->digest += zp__digest_share(slot_index(attempt, slot), result_crc);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending && forwards_result(&attempt->layout, place->chunk))
		zp__link_offer(attempt->next, &attempt->flow, &slot->node);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&engine->mutex);
}

/* A frame is complete and its CRC is right. */
void zp__ring_landed(zp__connection *c)
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
	if (place->chunk == attempt->layout.rank)
		return input_at(attempt, place);
	return attempt->mode == ZP__IN_PLACE_RESTORE ? workspace_at(attempt, place) : output_at(attempt, place);
}

/* Makes the header and body of the frame in c->tx. The frames of our own chunk are quantised and checksummed here, by
 * the connection that sends them, just before. */
void zp__ring_prepare(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	zp__attempt *attempt = tx->attempt;
	zp__slot *slot = tx->slot;
	const zp__layout *l = &attempt->layout;
	zp__place place = zp__slot_place(l, slot_index(attempt, slot));
	const uint8_t *body = body_of(attempt, slot, &place);
	tx->length = (uint32_t)zp__wire_bytes(l, place.elements);
	if (slot->kind == ZP__REDUCE_SCATTER && place.chunk == l->rank) {
		if (attempt->quantised) {
			zp__quantiser how = quantiser_of(&attempt->plan);
			zp__quantise(zp__isa_best(), &how, wire_at(attempt, slot), input_at(attempt, &place),
				     place.elements);
		}
		slot->crc = zp__crc32c(0, body, tx->length);
	}
	zp__frame frame = {.kind = slot->kind,
			   .id = attempt->plan.attempt,
			   .chunk = place.chunk,
			   .offset = place.offset,
			   .length = tx->length,
			   .crc = slot->crc};
	zp__frame_encode(tx->header, &frame);
	tx->body = body;
}

/* A frame has left. */
void zp__ring_sent(zp__attempt *attempt, zp__slot *slot)
{
	attempt->tx_remaining--;
	if (slot->kind == ZP__REDUCE_SCATTER) {
		slot->flags |= ZP__SLOT_SENT;
		for (uint32_t i = 0; i < attempt->previous->connection_count; i++) {
			zp__connection *c = &attempt->previous->connections[i];
			if (!zp__list_empty(&c->parked_node) && c->rx.frame.id == attempt->plan.attempt)
				zp__unpark(c);
		}
	}
	zp__attempt_progress(attempt);
}

void zp__ring_restore(zp__attempt *attempt)
{
	if (attempt->mode != ZP__IN_PLACE_RESTORE)
		return;
	for (uint64_t i = 0; i < attempt->layout.slot_count; i++) {
		if (!(attempt->slots[i].flags & ZP__SLOT_SAVED))
			continue;
		zp__place place = zp__slot_place(&attempt->layout, i);
		memcpy(output_at(attempt, &place), workspace_at(attempt, &place),
		       place.elements * attempt->layout.itemsize);
	}
}
