/* How a tensor is cut: into one chunk per peer (broadcast: one chunk), and each chunk into slots of one frame. All peers
 * compute the same layout from the same plan. In a ring the reduce-scatter of a chunk starts at the rank after its
 * owner; the owner is the last to add its share and starts the all-gather. In a ring all-reduce rank j - 1 owns chunk j;
 * for other collectives the plan names the owners. Chunk j of lanes is lane j. */
#ifndef ZP_LAYOUT_H
#define ZP_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where a chunk begins. */
typedef struct {
	uint64_t position; /* elements from the start of the tensor */
	uint64_t first_slot;
} zp__cut;

typedef struct {
	uint32_t world_size, rank;
	uint32_t chunks;
	bool reduces, gathers;	 /* the plan has a reduce-scatter phase, an all-gather phase */
	const uint32_t *owners;	 /* by chunk; NULL: as in an all-reduce */
	zp__cut *cuts;		 /* by chunk, and the end; NULL: lengths differ by at most one element */
	uint64_t chunk_elements; /* of a short chunk; with `cuts`: of the longest one */
	uint64_t long_chunks;	 /* the first long_chunks chunks have one element more */
	uint64_t frame_elements; /* of a slot; the last slot of a chunk may have fewer */
	uint64_t long_slots, short_slots; /* slots of a long chunk, of a short chunk */
	uint64_t slot_count;
	uint32_t itemsize;
	uint32_t block_elements;  /* 0: not quantised */
	uint32_t parameter_bytes; /* per block */
	uint32_t code_bits;	  /* per element, quantised */
	uint32_t sum_itemsize;	  /* of an element in a reduce-scatter frame with wide sums (ring.c); otherwise 0 */
	size_t wire_stride;	  /* the most bytes of a full slot on the wire; 1 in lanes that do not reduce */
} zp__layout;

typedef struct {
	uint32_t chunk;
	uint64_t offset;   /* elements from the start of the chunk */
	uint64_t position; /* elements from the start of the tensor */
	uint64_t elements;
} zp__span;

static inline uint64_t zp__chunk_elements(const zp__layout *l, uint32_t chunk)
{
	if (l->cuts)
		return l->cuts[chunk + 1].position - l->cuts[chunk].position;
	return l->chunk_elements + (chunk < l->long_chunks);
}

static inline uint64_t zp__chunk_position(const zp__layout *l, uint32_t chunk)
{
	if (l->cuts)
		return l->cuts[chunk].position;
	return chunk * l->chunk_elements + (chunk < l->long_chunks ? chunk : l->long_chunks);
}

static inline uint64_t zp__chunk_slots(const zp__layout *l, uint32_t chunk)
{
	if (l->cuts)
		return l->cuts[chunk + 1].first_slot - l->cuts[chunk].first_slot;
	return chunk < l->long_chunks ? l->long_slots : l->short_slots;
}

static inline uint64_t zp__chunk_first_slot(const zp__layout *l, uint32_t chunk)
{
	if (l->cuts)
		return l->cuts[chunk].first_slot;
	if (chunk <= l->long_chunks)
		return chunk * l->long_slots;
	return l->long_chunks * l->long_slots + (chunk - l->long_chunks) * l->short_slots;
}

/* Ring only. */
static inline uint32_t zp__chunk_owner(const zp__layout *l, uint32_t chunk)
{
	return l->owners ? l->owners[chunk] : (chunk + l->world_size - 1) % l->world_size;
}

static inline uint32_t zp__chunk_start(const zp__layout *l, uint32_t chunk)
{
	return l->owners ? (l->owners[chunk] + 1) % l->world_size : chunk;
}

static inline size_t zp__wire_bytes(const zp__layout *l, uint64_t elements)
{
	if (!l->block_elements)
		return elements * l->itemsize;
	uint64_t whole = elements / l->block_elements, rest = elements % l->block_elements;
	return (whole + (rest > 0)) * l->parameter_bytes + whole * ((l->block_elements * l->code_bits + 7) / 8) +
	       (rest * l->code_bits + 7) / 8;
}

/* The chunk of a slot, by bisection of `cuts`. */
static inline uint32_t zp__chunk_of(const zp__layout *l, uint64_t slot)
{
	uint32_t first = 0, past = l->chunks;
	while (past - first > 1) {
		uint32_t middle = first + (past - first) / 2;
		if (l->cuts[middle].first_slot <= slot)
			first = middle;
		else
			past = middle;
	}
	return first;
}

static inline zp__span zp__slot_span(const zp__layout *l, uint64_t slot)
{
	zp__span span;
	uint64_t long_total = l->long_chunks * l->long_slots;
	if (l->cuts) {
		span.chunk = zp__chunk_of(l, slot);
		span.offset = (slot - l->cuts[span.chunk].first_slot) * l->frame_elements;
	} else if (slot < long_total) {
		span.chunk = (uint32_t)(slot / l->long_slots);
		span.offset = slot % l->long_slots * l->frame_elements;
	} else {
		span.chunk = (uint32_t)(l->long_chunks + (slot - long_total) / l->short_slots);
		span.offset = (slot - long_total) % l->short_slots * l->frame_elements;
	}
	uint64_t rest = zp__chunk_elements(l, span.chunk) - span.offset;
	span.elements = rest < l->frame_elements ? rest : l->frame_elements;
	span.position = zp__chunk_position(l, span.chunk) + span.offset;
	return span;
}

#endif
