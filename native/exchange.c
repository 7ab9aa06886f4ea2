/* The exchange of one attempt at an all-to-all: row j of the input goes straight to rank j, and the row from rank j
 * goes to row j of the output. Nothing is reduced or forwarded, and input and output are separate. So no frame waits
 * for another one, and no buffers are needed.
 *
 * A slot of row j stands for two frames: the one that we send to rank j (`node`, `sequence`, `checksum`, `kind`) and
 * the one that we receive from it (flags LANDING and RESULT). On the wire a frame names the row of its receiver. Our
 * own row is copied together with the row of the next rank, slot by slot. */
#include "buffers.h"

static int exchange_allocate(zp__attempt *attempt)
{
	(void)attempt;
	return 0;
}

static zp__slot *row_at(const zp__attempt *attempt, uint32_t rank)
{
	return attempt->slots + zp__chunk_first_slot(&attempt->layout, rank);
}

static void exchange_start(zp__attempt *attempt)
{
	uint64_t slots = zp__chunk_slots(&attempt->layout, 0);
	attempt->rx_remaining = attempt->tx_remaining = slots * attempt->neighbour_count;
	for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
		zp__neighbour *to = &attempt->neighbours[i];
		zp__slot *slot = row_at(attempt, to->rank);
		for (uint64_t k = 0; k < slots; k++, slot++) {
			slot->kind = ZP__ALL_GATHER;
			zp__link_offer(to->link, &to->flow, &slot->node);
		}
	}
}

static enum zp__verdict exchange_admit(zp__attempt *attempt, zp__receive *rx)
{
	uint32_t own = attempt->layout.rank, neighbour = neighbour_at(attempt, rx->link);
	const zp__slot *named = slot_of(attempt, &rx->frame);
	if (neighbour == attempt->neighbour_count || !named)
		return ZP__VIOLATION;
	if (rx->frame.kind != ZP__ALL_GATHER || rx->frame.chunk != own)
		return ZP__VIOLATION;
	zp__slot *slot = row_at(attempt, attempt->neighbours[neighbour].rank) + (named - row_at(attempt, own));
	if (slot->flags & ZP__SLOT_LANDING)
		return ZP__VIOLATION;
	slot->flags |= ZP__SLOT_LANDING;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	rx->slot = slot;
	rx->body = output_at(attempt, &span);
	return ZP__ADMIT;
}

static void exchange_landed(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	pthread_mutex_lock(&attempt->engine->mutex);
	rx->slot->flags |= ZP__SLOT_RESULT;
	attempt->rx_remaining--;
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&attempt->engine->mutex);
}

static void exchange_prepare(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	zp__attempt *attempt = tx->attempt;
	const zp__layout *l = &attempt->layout;
	zp__span span = zp__slot_span(l, slot_index(attempt, tx->slot));
	if (span.chunk == (l->rank + 1) % l->world_size) {
		uint64_t number = (uint64_t)(tx->slot - row_at(attempt, span.chunk));
		zp__span own = zp__slot_span(l, slot_index(attempt, row_at(attempt, l->rank) + number));
		memcpy(output_at(attempt, &own), input_at(attempt, &own), own.elements * l->itemsize);
	}
	const uint8_t *body = input_at(attempt, &span);
	tx->slot->checksum = c->records ? 0 : (uint32_t)zp__checksum_of(body, zp__wire_bytes(l, span.elements));
	frame_fill(tx, &span, body);
}

static void exchange_cut(zp__receive *rx)
{
	rx->slot->flags &= (uint8_t)~ZP__SLOT_LANDING;
}

const zp__algorithm zp__exchange = {.allocate = exchange_allocate,
				    .start = exchange_start,
				    .admit = exchange_admit,
				    .make_room = room_is_there,
				    .landed = exchange_landed,
				    .prepare = exchange_prepare,
				    .sent = sent_count,
				    .unsent = unsent_count,
				    .cut = exchange_cut};
