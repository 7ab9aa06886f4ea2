/* The one-shot exchange of one attempt: one hop. Every rank sends its whole tensor to all others, and each rank reduces
 * all tensors in order of rank, so that the results are equal bit for bit. It is for tensors so small that a second
 * hop, for the results, would take longer than sending the bytes to all.
 *
 * The tensor is one chunk, which every rank owns. It is sent from a copy of the input, in `wire`, because in place the
 * result may overwrite the input before the last frame is sent or sent again. Shares are received in `shares`; the
 * thread that receives the last one of a slot reduces the slot. A copy (attempt->copies) stands for two frames of a
 * slot: the one to a neighbour (`node`, `sequence`, `checksum`) and the one from it (flag ARRIVING). */
#include <errno.h>
#include <stdlib.h>

#include "buffers.h"

static zp__slot *copy_of(const zp__attempt *attempt, const zp__slot *slot, uint32_t neighbour)
{
	return attempt->copies + slot_index(attempt, slot) * attempt->neighbour_count + neighbour;
}

static uint8_t *share_at(const zp__attempt *attempt, const zp__slot *slot, uint32_t neighbour)
{
	uint64_t at = slot_index(attempt, slot) * attempt->neighbour_count + neighbour;
	return attempt->shares.memory + at * attempt->layout.wire_stride;
}

static uint8_t *own_at(const zp__attempt *attempt, const zp__span *span)
{
	return attempt->wire.memory + span->position * attempt->layout.itemsize;
}

static int one_shot_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	uint64_t copies = l->slot_count * attempt->neighbour_count;
	attempt->copies = calloc(copies, sizeof *attempt->copies);
	if (!attempt->copies)
		return -ENOMEM;
	for (uint64_t i = 0; i < copies; i++)
		zp__list_init(&attempt->copies[i].node);
	size_t bytes = attempt->plan.count * l->itemsize;
	int rc = zp__region_take(attempt->engine, copies * l->wire_stride, &attempt->shares);
	if (rc == 0)
		rc = zp__region_take(attempt->engine, bytes, &attempt->wire);
	if (rc == 0)
		memcpy(attempt->wire.memory, attempt->plan.input, bytes);
	return rc;
}

static void one_shot_start(zp__attempt *attempt)
{
	attempt->rx_remaining = attempt->tx_remaining = attempt->layout.slot_count * attempt->neighbour_count;
	for (uint64_t k = 0; k < attempt->layout.slot_count; k++) {
		zp__slot *slot = &attempt->slots[k];
		slot->missing = (uint16_t)attempt->neighbour_count;
		for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
			zp__neighbour *to = &attempt->neighbours[i];
			zp__slot *copy = copy_of(attempt, slot, i);
			copy->kind = ZP__REDUCE_SCATTER;
			zp__link_offer(to->link, &to->flow, &copy->node);
		}
	}
}

static enum zp__verdict one_shot_admit(zp__attempt *attempt, zp__receive *rx)
{
	uint32_t neighbour = neighbour_at(attempt, rx->link);
	zp__slot *slot = slot_of(attempt, &rx->frame);
	if (neighbour == attempt->neighbour_count || !slot || rx->frame.kind != ZP__REDUCE_SCATTER)
		return ZP__VIOLATION;
	zp__slot *copy = copy_of(attempt, slot, neighbour);
	if (copy->flags & ZP__SLOT_ARRIVING)
		return ZP__VIOLATION;
	copy->flags |= ZP__SLOT_ARRIVING;
	rx->slot = slot;
	rx->body = share_at(attempt, slot, neighbour);
	return ZP__ADMIT;
}

static void one_shot_landed(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	zp__slot *slot = rx->slot;
	pthread_mutex_lock(&attempt->engine->mutex);
	bool last = --slot->missing == 0;
	attempt->rx_remaining -= !last; /* The last share counts once the result is made. */
	pthread_mutex_unlock(&attempt->engine->mutex);
	if (!last)
		return;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, &span);
	const zp_reduce_plan *plan = &attempt->plan;
	zp__join join = {.count = plan->world_size,
			 .place = plan->rank,
			 .divisor = plan->op == ZP_AVG ? plan->world_size : 1,
			 .everywhere = true};
	uint64_t checksum = zp__shares_join(attempt, &join, output_at(attempt, &span), own_at(attempt, &span),
					    share_at(attempt, slot, 0), span.elements);
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->flags |= ZP__SLOT_RESULT;
	attempt->digest += zp__digest_share(slot_index(attempt, slot), checksum);
	attempt->rx_remaining--;
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&attempt->engine->mutex);
}

static void one_shot_prepare(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	const zp__attempt *attempt = tx->attempt;
	uint64_t slot = (uint64_t)(tx->slot - attempt->copies) / attempt->neighbour_count;
	zp__span span = zp__slot_span(&attempt->layout, slot);
	const uint8_t *body = own_at(attempt, &span);
	tx->slot->checksum = c->records ? 0 : (uint32_t)zp__checksum_of(body, span.elements * attempt->layout.itemsize);
	frame_fill(tx, &span, body);
}

static void one_shot_cut(zp__receive *rx)
{
	copy_of(rx->attempt, rx->slot, neighbour_at(rx->attempt, rx->link))->flags &= (uint8_t)~ZP__SLOT_ARRIVING;
}

const zp__algorithm zp__one_shot = {.allocate = one_shot_allocate,
				    .start = one_shot_start,
				    .admit = one_shot_admit,
				    .make_room = room_is_there,
				    .landed = one_shot_landed,
				    .prepare = one_shot_prepare,
				    .sent = sent_count,
				    .unsent = unsent_count,
				    .cut = one_shot_cut};
