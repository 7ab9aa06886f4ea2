/* Where the bytes of a slot are, and what both algorithms do with them. "Pinned" as in zp_internal.h. */
#ifndef ZP_BUFFERS_H
#define ZP_BUFFERS_H

#include <assert.h>
#include <string.h>

#include "digest.h"
#include "quantise.h"
#include "reduce.h"
#include "zp_internal.h"

static inline uint64_t slot_index(const zp__attempt *attempt, const zp__slot *slot)
{
	return (uint64_t)(slot - attempt->slots);
}

static inline uint8_t *output_at(const zp__attempt *attempt, const zp__place *place)
{
	uint64_t position = attempt->mode == ZP__SCATTER ? place->offset : place->position;
	return (uint8_t *)attempt->plan.output + position * attempt->layout.itemsize;
}

static inline const uint8_t *input_at(const zp__attempt *attempt, const zp__place *place)
{
	return (const uint8_t *)attempt->plan.input + place->position * attempt->layout.itemsize;
}

static inline uint8_t *workspace_at(const zp__attempt *attempt, const zp__place *place)
{
	return attempt->workspace.memory + place->position * attempt->layout.itemsize;
}

static inline zp__quantiser quantiser_of(const zp_reduce_plan *plan)
{
	return (zp__quantiser){.algorithm = plan->quantization,
			       .quantized = plan->quantized,
			       .dtype = plan->dtype,
			       .op = plan->op,
			       .block_elements = plan->block_elements};
}

/* The slot that a frame is for, if it is of the plan: in a chunk, at a multiple of the frame size, of its length. */
static inline zp__slot *slot_of(const zp__attempt *attempt, const zp__frame *frame)
{
	const zp__layout *l = &attempt->layout;
	if (frame->lane != 0 || frame->chunk >= l->chunks)
		return NULL;
	if (frame->offset >= zp__chunk_elements(l, frame->chunk) || frame->offset % l->frame_elements)
		return NULL;
	uint64_t index = zp__chunk_first_slot(l, frame->chunk) + frame->offset / l->frame_elements;
	zp__place place = zp__slot_place(l, index);
	assert(place.chunk == frame->chunk && place.offset == frame->offset);
	return frame->length == zp__wire_bytes(l, place.elements) ? &attempt->slots[index] : NULL;
}

static inline void mark(zp__attempt *attempt, zp__slot *slot, uint8_t flags)
{
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->flags |= flags;
	pthread_mutex_unlock(&attempt->engine->mutex);
}

/* Pinned. Saves the old bytes of the output before it is written. */
static inline void save(zp__attempt *attempt, zp__slot *slot, const zp__place *place)
{
	if (slot->flags & ZP__SLOT_SAVED) /* A part of the frame came before, on a connection that was lost. */
		return;
	size_t bytes = place->elements * attempt->layout.itemsize;
	zp__copy_past_cache(workspace_at(attempt, place), output_at(attempt, place), bytes);
	zp__copy_past_cache_done();
	mark(attempt, slot, ZP__SLOT_SAVED);
}

/* Pinned. Puts the result that `wire` holds in the output. Returns the CRC of the output's bytes. */
static inline uint32_t result_dequantise(zp__attempt *attempt, zp__slot *slot, const zp__place *place,
					 const uint8_t *wire)
{
	zp__quantiser how = quantiser_of(&attempt->plan);
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, place);
	zp__dequantise(zp__isa_best(), &how, output_at(attempt, place), wire, place->elements);
	return zp__crc32c(0, output_at(attempt, place), place->elements * attempt->layout.itemsize);
}

/* Pinned. Makes the header of the frame of `tx`, whose slot has kind and CRC, and says where its body is. */
static inline void frame_fill(zp__transmit *tx, const zp__place *place, const uint8_t *body)
{
	tx->length = (uint32_t)zp__wire_bytes(&tx->attempt->layout, place->elements);
	zp__frame frame = {.kind = tx->slot->kind,
			   .id = tx->attempt->plan.attempt,
			   .chunk = place->chunk,
			   .offset = place->offset,
			   .length = tx->length,
			   .crc = tx->slot->crc};
	zp__frame_encode(tx->header, &frame);
	tx->body = body;
}

/* Lock held. Lets the connections of `link` look again at frames of the attempt that had to wait for their place. */
static inline void link_unpark(const zp__attempt *attempt, zp__link *link)
{
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		if (!zp__list_empty(&c->parked_node) && c->rx.frame.id == attempt->plan.attempt)
			zp__unpark(c);
	}
}

#endif
