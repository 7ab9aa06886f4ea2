/* The direct exchange of one attempt: two hops, for any number of peers, and two roundings where the tensor is quantised.
 *
 * Rank j owns chunk j. All other ranks send it their shares of that chunk (reduce-scatter frames). It reduces them and
 * its own share in order of rank, so that the result does not depend on the order of arrival, and sends the result to
 * all (all-gather frames). Nothing is forwarded. The thread that receives the last share of a slot reduces the slot.
 *
 *   mode              | shares are    | the result of our own chunk        | the result of another chunk
 *                     | received      |                                    |
 *   not quantised     | in `shares`   | is made in the output and sent     | is received in the output
 *                     |               | from there                         |
 *   quantised         | in `shares`   | is made in `wire`, sent from there | is received in `wire`, where our share was
 *                     |               | and dequantised to the output      | quantised, and dequantised to the output
 *
 * In place with restore, the old bytes of the output are saved to the workspace before a result overwrites them.
 *
 * The window. Besides the workspace an attempt needs buffers for a window of slots, at most ZP__DIRECT_WINDOW_BYTES
 * whatever the size of the tensor, and the slots themselves. Each sender of shares limits itself: it queues the shares
 * of the first `window` slots of each chunk; each result of slot s that it receives lets it queue the share of slot
 * s + window of the same chunk. Therefore, when a share of slot s arrives,
 *   - the share of slot s - window from the same peer was reduced already, because that peer has its result;
 * and when all shares of slot s have arrived,
 *   - every peer has received the result of slot s - window: its buffer in `wire` may be overwritten.
 * All peers compute the same window from the same plan.
 *
 * Why it cannot deadlock. No frame on a connection waits for another frame, of its own or of another attempt: by the
 * rule above there is a free buffer for each share that arrives, and for each result, because our share of its slot was
 * sent. (The sending thread may not have recorded that yet; then the frame waits some microseconds for that thread,
 * which waits for nothing. Frames of an attempt that is not begun here are kept or not sent yet: early.c.) So every queued
 * frame reaches its receiver. Shares of slots below `window` are queued at the start, and the share of slot s when the
 * result of slot s - window has arrived: by induction all of them arrive.
 *
 * A buffer is overwritten only after what was sent from it has arrived: a result proves that the share arrived, and a
 * share one window later proves that the result arrived. So every frame that may not have arrived can be retransmitted.
 *
 * The functions marked "pinned" work on the memory of slots without the lock: by the same rules only one thread at a
 * time uses a buffer. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "buffers.h"

/* Index of a slot in its chunk. */
static uint64_t slot_number(const zp__attempt *attempt, const zp__slot *slot, uint32_t chunk)
{
	return slot_index(attempt, slot) - zp__chunk_first_slot(&attempt->layout, chunk);
}

static zp__slot *own_slot(const zp__attempt *attempt, uint64_t number)
{
	return attempt->slots + zp__chunk_first_slot(&attempt->layout, attempt->layout.rank) + number;
}

static zp__slot *copy_of(const zp__attempt *attempt, uint64_t number, uint32_t neighbour)
{
	return attempt->copies + number * attempt->neighbour_count + neighbour;
}

static bool is_copy(const zp__attempt *attempt, const zp__slot *slot)
{
	uint64_t own = zp__chunk_slots(&attempt->layout, attempt->layout.rank);
	return attempt->copies && slot >= attempt->copies && slot < attempt->copies + own * attempt->neighbour_count;
}

/* The buffer for a neighbour's share of slot `number` of our chunk. */
static uint8_t *share_at(const zp__attempt *attempt, uint64_t number, uint32_t neighbour)
{
	uint64_t at = number % attempt->window * attempt->neighbour_count + neighbour;
	return attempt->shares.memory + at * attempt->layout.wire_stride;
}

/* The quantised bytes of slot `number` of a neighbour's chunk; with neighbour_count, of our own chunk. */
static uint8_t *wire_at(const zp__attempt *attempt, uint64_t number, uint32_t neighbour)
{
	uint64_t at = number % attempt->window * (attempt->neighbour_count + 1) + neighbour;
	return attempt->wire.memory + at * attempt->layout.wire_stride;
}

static int trees_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	uint64_t own = zp__chunk_slots(l, l->rank);
	size_t shares = attempt->neighbour_count * l->wire_stride;
	size_t wire = attempt->quantised ? shares + l->wire_stride : 0;
	uint64_t room = ZP__DIRECT_WINDOW_BYTES / (shares + wire);
	attempt->window = room < l->long_slots ? room : l->long_slots;
	assert(attempt->window);
	if (own) {
		attempt->copies = calloc(own * attempt->neighbour_count, sizeof *attempt->copies);
		if (!attempt->copies)
			return -ENOMEM;
		for (uint64_t i = 0; i < own * attempt->neighbour_count; i++)
			zp__list_init(&attempt->copies[i].node);
	}
	int rc = zp__region_take(attempt->engine, own ? attempt->window * shares : 0, &attempt->shares);
	return rc < 0 ? rc : zp__region_take(attempt->engine, attempt->window * wire, &attempt->wire);
}

static void offer(zp__attempt *attempt, uint32_t neighbour, zp__slot *slot)
{
	zp__neighbour *to = &attempt->neighbours[neighbour];
	zp__link_offer(to->link, &to->flow, &slot->node);
}

/* Queues our share of slot `number` of another peer's chunk, if there is such a slot. */
static void share_offer(zp__attempt *attempt, uint32_t chunk, uint64_t number)
{
	if (number >= zp__chunk_slots(&attempt->layout, chunk))
		return;
	zp__slot *slot = attempt->slots + zp__chunk_first_slot(&attempt->layout, chunk) + number;
	slot->kind = ZP__REDUCE_SCATTER;
	slot->flags |= ZP__SLOT_REDUCED;
	offer(attempt, neighbour_of(attempt, chunk), slot);
}

static void trees_start(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	uint64_t own = zp__chunk_slots(l, l->rank);
	uint64_t frames = own * attempt->neighbour_count + (l->slot_count - own);
	attempt->rx_remaining = attempt->tx_remaining = frames;
	for (uint64_t number = 0; number < own; number++)
		own_slot(attempt, number)->missing = (uint16_t)attempt->neighbour_count;
	for (uint32_t i = 0; i < attempt->neighbour_count; i++)
		for (uint64_t number = 0; number < attempt->window; number++)
			share_offer(attempt, attempt->neighbours[i].rank, number);
}

static enum zp__verdict share_admit(zp__attempt *attempt, zp__receive *rx, zp__slot *slot, uint32_t neighbour)
{
	uint64_t number = slot_number(attempt, slot, attempt->layout.rank);
	zp__slot *copy = copy_of(attempt, number, neighbour);
	if (copy->flags & ZP__SLOT_ARRIVING)
		return ZP__VIOLATION;
	if (number >= attempt->window) {
		zp__slot *before = copy_of(attempt, number - attempt->window, neighbour);
		if (!(before->flags & ZP__SLOT_REDUCED))
			return ZP__VIOLATION;
		if (!(before->flags & ZP__SLOT_SENT))
			return ZP__PARK;
		zp__list_remove(&before->node); /* The result of that slot has arrived. */
	}
	copy->flags |= ZP__SLOT_ARRIVING;
	rx->body = share_at(attempt, number, neighbour);
	return ZP__ADMIT;
}

static enum zp__verdict result_admit(zp__attempt *attempt, zp__receive *rx, zp__slot *slot, uint32_t neighbour)
{
	if (slot->flags & ZP__SLOT_LANDING || !(slot->flags & ZP__SLOT_REDUCED))
		return ZP__VIOLATION;
	if (!(slot->flags & ZP__SLOT_SENT))
		return ZP__PARK;
	zp__list_remove(&slot->node); /* This result contains our share, so the share has arrived. */
	slot->flags |= ZP__SLOT_LANDING;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	rx->body = attempt->quantised ? wire_at(attempt, slot_number(attempt, slot, span.chunk), neighbour)
					: output_at(attempt, &span);
	return ZP__ADMIT;
}

static enum zp__verdict trees_admit(zp__attempt *attempt, zp__receive *rx)
{
	const zp__frame *frame = &rx->frame;
	uint32_t neighbour = neighbour_at(attempt, rx->link);
	zp__slot *slot = slot_of(attempt, frame);
	if (neighbour == attempt->neighbour_count || !slot)
		return ZP__VIOLATION;
	bool is_share = frame->kind == ZP__REDUCE_SCATTER;
	if (frame->chunk != (is_share ? attempt->layout.rank : attempt->neighbours[neighbour].rank))
		return ZP__VIOLATION;
	rx->slot = slot;
	return (is_share ? share_admit : result_admit)(attempt, rx, slot, neighbour);
}

static int trees_make_room(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	if (rx->frame.kind != ZP__ALL_GATHER || attempt->mode != ZP__IN_PLACE_RESTORE || attempt->quantised)
		return 0;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, rx->slot));
	save(attempt, rx->slot, &span);
	return 0;
}

/* NULL: nothing is gained by making elements wide. The sum of two is rounded once all the same. */
static const zp__wide_kernels *wide_kernels_of(const zp_reduce_plan *plan, const zp__join *join)
{
	const zp__wide_kernels *wide = &zp__reduce_kernels_of(zp__isa_best())->wide[plan->dtype];
	return wide->fold[plan->op] && (join->count > 2 || join->divisor > 1) ? wide : NULL;
}

/* As piece_join, with elements made wide: rounded once, when the result is stored. */
static void piece_join_wide(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own,
			    uint8_t *shares, size_t at, size_t count)
{
	uint32_t sums[ZP__WIDE_PIECE_BYTES]; /* 4 bytes of sum for each of element, at most */
	const zp__wide_kernels *wide = wide_kernels_of(&attempt->plan, join);
	for (uint32_t i = 0; i < join->count; i++) {
		uint32_t other = i - (i > join->place);
		const uint8_t *share = (i == join->place ? own : shares + other * attempt->layout.wire_stride) + at;
		uint32_t inputs = i == join->place || !join->inputs ? 1 : join->inputs[other];
		if (i == 0)
			wide->widen(sums, share, count);
		else if (inputs == 1)
			wide->fold[attempt->plan.op](sums, share, count);
		if (inputs > 1)
			wide->fold_mean(sums, share, count, inputs - (i == 0));
	}
	wide->narrow(result + at, sums, count, join->divisor);
}

/* Reduces `count` elements of all shares, `at` bytes from their start. Each element is read before it is written. */
static void piece_join(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own, uint8_t *shares,
		       size_t at, size_t count)
{
	const zp_reduce_plan *plan = &attempt->plan;
	const zp__reduce_kernels *kernels = zp__reduce_kernels_of(zp__isa_best());
	size_t stride = attempt->layout.wire_stride;
	uint8_t *sum = shares + at;
	const uint8_t *so_far = join->place == 0 ? own + at : sum;
	for (uint32_t i = 1; i < join->count; i++) {
		const uint8_t *next = i == join->place ? own + at : shares + (i - (i > join->place)) * stride + at;
		uint8_t *to = i + 1 == join->count ? result + at : sum;
		kernels->reduce[plan->dtype][plan->op](to, so_far, next, count);
		so_far = to;
	}
	if (join->divisor > 1)
		kernels->divide[plan->dtype](result + at, count, join->divisor);
}

uint64_t zp__shares_join(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own,
			 uint8_t *shares, uint64_t elements)
{
	size_t itemsize = attempt->layout.itemsize, bytes = elements * itemsize;
	bool wide = wide_kernels_of(&attempt->plan, join) != NULL;
	size_t piece_bytes = wide ? ZP__WIDE_PIECE_BYTES : ZP__PIECE_BYTES;
	zp__checksum so_far = {.bytes = 0};
	for (size_t at = 0; at < bytes; at += piece_bytes) {
		size_t n = bytes - at < piece_bytes ? bytes - at : piece_bytes;
		(wide ? piece_join_wide : piece_join)(attempt, join, result, own, shares, at, n / itemsize);
		zp__checksum_advance(&so_far, result, at + n);
	}
	return zp__checksum_finish(&so_far, result, bytes);
}

/* Reduces a slot of our chunk whose shares have all arrived. Returns the checksum of the frames that carry the result;
 * sets `result_checksum` to that of its bytes in the output. */
static uint64_t slot_join(zp__attempt *attempt, zp__slot *slot, uint64_t number, uint64_t *result_checksum)
{
	const zp__layout *l = &attempt->layout;
	zp__span span = zp__slot_span(l, slot_index(attempt, slot));
	if (attempt->quantised) {
		const uint8_t *shares[ZP__WORLD_SIZE_MAX];
		for (uint32_t i = 0; i < attempt->neighbour_count; i++)
			shares[i] = share_at(attempt, number, i);
		zp__quantiser how = quantiser_of(&attempt->plan);
		uint8_t *wire = wire_at(attempt, number, attempt->neighbour_count);
		zp__quantise_join(zp__isa_best(), &how, wire, shares, l->world_size, l->rank, input_at(attempt, &span),
				  span.elements, attempt->plan.op == ZP_AVG ? l->world_size : 1);
		*result_checksum = result_dequantise(attempt, slot, &span, wire);
		return zp__checksum_of(wire, zp__wire_bytes(l, span.elements));
	}
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, &span);
	zp__join join = {.count = l->world_size,
			 .place = l->rank,
			 .divisor = attempt->plan.op == ZP_AVG ? l->world_size : 1};
	*result_checksum = zp__shares_join(attempt, &join, output_at(attempt, &span), input_at(attempt, &span),
					   share_at(attempt, number, 0), span.elements);
	return *result_checksum;
}

static void share_landed(zp__attempt *attempt, zp__slot *slot)
{
	uint64_t number = slot_number(attempt, slot, attempt->layout.rank);
	pthread_mutex_lock(&attempt->engine->mutex);
	bool last = --slot->missing == 0;
	attempt->rx_remaining -= !last; /* The last share counts once the result is made. */
	pthread_mutex_unlock(&attempt->engine->mutex);
	if (!last)
		return;
	uint64_t result_checksum, checksum = slot_join(attempt, slot, number, &result_checksum);
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->checksum = (uint32_t)checksum;
	slot->flags |= ZP__SLOT_RESULT;
	attempt->digest += zp__digest_share(slot_index(attempt, slot), result_checksum);
	attempt->rx_remaining--;
	bool goes_on = attempt->status == 0 && !attempt->ending;
	for (uint32_t k = 0; goes_on && k < attempt->neighbour_count; k++) {
		/* Start with the next rank: if all started with rank 0, it would be sent everything at once. */
		uint32_t i = (attempt->layout.rank + k) % attempt->neighbour_count;
		zp__slot *copy = copy_of(attempt, number, i);
		copy->kind = ZP__ALL_GATHER;
		copy->flags |= ZP__SLOT_REDUCED;
		offer(attempt, i, copy);
	}
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&attempt->engine->mutex);
}

static void result_landed(zp__receive *rx, zp__attempt *attempt, zp__slot *slot)
{
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	uint64_t checksum = attempt->quantised ? result_dequantise(attempt, slot, &span, rx->body) : rx->checksum;
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->flags |= ZP__SLOT_RESULT;
	attempt->digest += zp__digest_share(slot_index(attempt, slot), checksum);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending)
		share_offer(attempt, span.chunk, slot_number(attempt, slot, span.chunk) + attempt->window);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&attempt->engine->mutex);
}

static void trees_landed(zp__receive *rx)
{
	if (rx->frame.kind == ZP__REDUCE_SCATTER)
		share_landed(rx->attempt, rx->slot);
	else
		result_landed(rx, rx->attempt, rx->slot);
}

/* Makes the body of a share: the thread that is about to send it quantises and checksums it. */
static const uint8_t *share_prepare(zp__attempt *attempt, zp__slot *slot, const zp__span *span, bool encrypted)
{
	const uint8_t *body = input_at(attempt, span);
	if (attempt->quantised) {
		zp__quantiser how = quantiser_of(&attempt->plan);
		uint64_t number = slot_number(attempt, slot, span->chunk);
		uint8_t *wire = wire_at(attempt, number, neighbour_of(attempt, span->chunk));
		zp__quantise(zp__isa_best(), &how, wire, body, span->elements);
		body = wire;
	}
	slot->checksum = encrypted ? 0 : (uint32_t)zp__checksum_of(body, zp__wire_bytes(&attempt->layout, span->elements));
	return body;
}

static void trees_prepare(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	zp__attempt *attempt = tx->attempt;
	const zp__layout *l = &attempt->layout;
	zp__slot *slot = tx->slot;
	const uint8_t *body;
	zp__span span;
	if (is_copy(attempt, slot)) {
		uint64_t number = (uint64_t)(slot - attempt->copies) / attempt->neighbour_count;
		slot->checksum = own_slot(attempt, number)->checksum;
		span = zp__slot_span(l, slot_index(attempt, own_slot(attempt, number)));
		body = attempt->quantised ? wire_at(attempt, number, attempt->neighbour_count)
					  : output_at(attempt, &span);
	} else {
		span = zp__slot_span(l, slot_index(attempt, slot));
		body = share_prepare(attempt, slot, &span, c->records != NULL);
	}
	frame_fill(tx, &span, body);
}

static void trees_sent(zp__attempt *attempt, zp__slot *slot)
{
	uint32_t neighbour;
	if (is_copy(attempt, slot))
		neighbour = (uint32_t)((uint64_t)(slot - attempt->copies) % attempt->neighbour_count);
	else
		neighbour = neighbour_of(attempt, zp__slot_span(&attempt->layout, slot_index(attempt, slot)).chunk);
	slot->flags |= ZP__SLOT_SENT;
	attempt->tx_remaining--;
	link_unpark(attempt, attempt->neighbours[neighbour].link);
	zp__attempt_progress(attempt);
}

static void trees_unsent(zp__attempt *attempt, zp__slot *slot)
{
	attempt->tx_remaining++;
	slot->flags &= (uint8_t)~ZP__SLOT_SENT;
}

static void trees_cut(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	zp__slot *slot = rx->slot;
	if (rx->frame.kind == ZP__ALL_GATHER) {
		slot->flags &= (uint8_t)~ZP__SLOT_LANDING;
		return;
	}
	uint64_t number = slot_number(attempt, slot, attempt->layout.rank);
	copy_of(attempt, number, neighbour_at(attempt, rx->link))->flags &= (uint8_t)~ZP__SLOT_ARRIVING;
}

const zp__algorithm zp__trees = {.allocate = trees_allocate,
				 .start = trees_start,
				 .admit = trees_admit,
				 .make_room = trees_make_room,
				 .landed = trees_landed,
				 .prepare = trees_prepare,
				 .sent = trees_sent,
				 .unsent = trees_unsent,
				 .cut = trees_cut};
