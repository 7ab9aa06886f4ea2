/* Where the bytes of a slot are, and operations on slots and neighbours that the algorithms share. "Pinned" is defined
 * in attempt.h. */
#ifndef ZP_BUFFERS_H
#define ZP_BUFFERS_H

#include <assert.h>
#include <string.h>

#include "attempt.h"
#include "checksum.h"
#include "digest.h"
#include "engine.h"
#include "memory.h"
#include "quantise.h"
#include "reduce.h"

/* Index of the neighbour at the other end of a link; neighbour_count: none. */
static inline uint32_t neighbour_at(const zp__attempt *attempt, const zp__link *link)
{
	uint32_t neighbour = 0;
	while (neighbour < attempt->neighbour_count && attempt->neighbours[neighbour].link != link)
		neighbour++;
	return neighbour;
}

static inline uint64_t slot_index(const zp__attempt *attempt, const zp__slot *slot)
{
	return (uint64_t)(slot - attempt->slots);
}

static inline uint8_t *output_at(const zp__attempt *attempt, const zp__span *span)
{
	uint64_t position = attempt->mode == ZP__SCATTER ? span->offset : span->position;
	return (uint8_t *)attempt->plan.output + position * attempt->layout.itemsize;
}

static inline const uint8_t *input_at(const zp__attempt *attempt, const zp__span *span)
{
	return (const uint8_t *)attempt->plan.input + span->position * attempt->layout.itemsize;
}

static inline uint8_t *workspace_at(const zp__attempt *attempt, const zp__span *span)
{
	return attempt->workspace.memory + span->position * attempt->layout.itemsize;
}

static inline zp__quantiser quantiser_of(const zp_reduce_plan *plan)
{
	return (zp__quantiser){.algorithm = plan->quantization,
			       .quantized = plan->quantized,
			       .dtype = plan->dtype,
			       .op = plan->op,
			       .block_elements = plan->block_elements};
}

/* Length of a frame's body. In lanes, frames of a phase that the collective does not have are empty. */
static inline size_t frame_length(const zp__layout *l, uint8_t kind, uint64_t elements)
{
	if (l->cuts && !(kind == ZP__REDUCE_SCATTER ? l->reduces : l->gathers))
		return 0;
	return kind == ZP__REDUCE_SCATTER && l->sum_itemsize ? elements * l->sum_itemsize : zp__wire_bytes(l, elements);
}

/* The slot of a frame. NULL: the frame does not fit the plan (chunk, offset or length is wrong). */
static inline zp__slot *slot_of(const zp__attempt *attempt, const zp__frame *frame)
{
	const zp__layout *l = &attempt->layout;
	if (frame->chunk >= l->chunks)
		return NULL;
	if (frame->offset >= zp__chunk_elements(l, frame->chunk) || frame->offset % l->frame_elements)
		return NULL;
	uint64_t index = zp__chunk_first_slot(l, frame->chunk) + frame->offset / l->frame_elements;
	zp__span span = zp__slot_span(l, index);
	assert(span.chunk == frame->chunk && span.offset == frame->offset);
	return frame->length == frame_length(l, frame->kind, span.elements) ? &attempt->slots[index] : NULL;
}

static inline void mark(zp__attempt *attempt, zp__slot *slot, uint8_t flags)
{
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->flags |= flags;
	pthread_mutex_unlock(&attempt->engine->mutex);
}

/* Pinned. Saves the old bytes of the output before it is written. */
static inline void save(zp__attempt *attempt, zp__slot *slot, const zp__span *span)
{
	if (slot->flags & ZP__SLOT_SAVED) /* Saved before: a part of the frame came on a connection that was lost. */
		return;
	size_t bytes = span->elements * attempt->layout.itemsize;
	zp__copy_past_cache(workspace_at(attempt, span), output_at(attempt, span), bytes);
	zp__copy_past_cache_done();
	mark(attempt, slot, ZP__SLOT_SAVED);
}

/* Pinned. Dequantises the result at `wire` to the output. Returns the checksum of the output's bytes. */
static inline uint64_t result_dequantise(zp__attempt *attempt, zp__slot *slot, const zp__span *span,
					 const uint8_t *wire)
{
	zp__quantiser how = quantiser_of(&attempt->plan);
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, span);
	zp__dequantise(zp__isa_best(), &how, output_at(attempt, span), wire, span->elements);
	return zp__checksum_of(output_at(attempt, span), span->elements * attempt->layout.itemsize);
}

/* Pinned. Fills in the header, length and body of `tx`; its slot has kind and checksum already. */
static inline void frame_fill(zp__transmit *tx, const zp__span *span, const uint8_t *body)
{
	tx->length = (uint32_t)frame_length(&tx->attempt->layout, tx->slot->kind, span->elements);
	zp__frame frame = {.kind = tx->slot->kind,
			   .id = tx->attempt->plan.attempt,
			   .chunk = span->chunk,
			   .offset = span->offset,
			   .length = tx->length,
			   .checksum = tx->slot->checksum};
	zp__frame_encode(tx->header, &frame);
	tx->body = body;
}

/* The make_room() of algorithms in which no frame waits for another one, and which set rx->body at admission. */
static inline int room_is_there(zp__receive *rx)
{
	(void)rx;
	return 0;
}

static inline void sent_count(zp__attempt *attempt, zp__slot *slot)
{
	(void)slot;
	attempt->tx_remaining--;
	zp__attempt_progress(attempt);
}

static inline void unsent_count(zp__attempt *attempt, zp__slot *slot)
{
	(void)slot;
	attempt->tx_remaining++;
}

/* Lock held. Unparks the connections of `link` whose next frame belongs to the attempt. */
static inline void link_unpark(const zp__attempt *attempt, zp__link *link)
{
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		if (!zp__list_empty(&c->parked_node) && c->rx.frame.id == attempt->plan.attempt)
			zp__unpark(c);
	}
}

#endif
