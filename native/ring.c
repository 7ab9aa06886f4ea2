/* The cut-through ring of one attempt: a frame is reduced and forwarded as soon as it has arrived.
 *
 * Reduce-scatter: chunk j travels j -> j+1 -> ... -> j-1, and each rank adds its share. All-gather: rank j-1, the last
 * to add its share, owns the result and sends it j-1 -> j -> ... -> j-2. What one hop does with one frame:
 *
 *   mode              | a reduce-scatter frame is received in ...   | sent on from   | an all-gather frame is received in
 *   out of place      | the output; the input is added              | there          | the output
 *   in place          | a buffer of the connection; the sum is      | the output     | the output
 *                     | written to the output                       |                |
 *   quantised         | the wire buffer; our share is folded in     | there          | the wire buffer; sent on from there,
 *                     |                                             |                | dequantised to the output
 *   scatter           | the workspace, or the output if we own the  | there          | -
 *                     | chunk; the input is added                   |                |
 *   wide sums         | the wire buffer; our share is folded in     | there          | the output
 *
 * An all-reduce has both phases. A reduce-scatter has the first only: the owner keeps the result. An all-gather and a
 * broadcast have the second only: a chunk starts as its owner's input, copied to the output just before it is sent. In
 * these three the plan names the owners, so that rows and parts do not depend on the order of the ring.
 *
 * AVG. The sum of all shares may overflow although their mean does not. So a reduce-scatter frame carries
 *   float, double, 64-bit integers     the sum, which the owner divides
 *   16-bit floats                      the mean of the shares so far
 *   narrower integers, two peers       no sum: the owner has both shares
 *   narrower integers, more peers      the sum in a wider type (layout.sum_itemsize): it is exact, and the owner divides it
 *
 * In place with restore, the old bytes of the output are saved to the workspace before they are overwritten, when they
 * are in the cache anyway: for our own chunk when it is sent, for other chunks when our share is added. Quantised: when
 * the result is dequantised. Broadcast, and wide sums: before a result is received or made.
 *
 * Memory beyond the caller's. In place: one frame per connection and, with restore, the size of the tensor. Quantised:
 * the wire size of the whole tensor, about 1/4 of FLOAT, 1/2 of the 16-bit types and 1/8 of DOUBLE, and, in place with
 * restore, the workspace. Scatter: the chunks that pass through, (N-2)/N of the tensor. Wide sums: two or four times
 * the tensor.
 *
 * The second frame (all-gather) of a slot overwrites the first one (reduce-scatter) only after the first was sent,
 * since the data travels around the ring in between. If a thread has just sent the first frame and not recorded that
 * yet, the second waits some microseconds for that thread. If it comes still earlier, a faulty peer made it without our
 * share. That need not be the one before us, which passes on what it gets. So the attempt fails, the link stays, and
 * nobody is named. Receiving never waits for a peer that does not take what we send, and the ring cannot deadlock.
 *
 * The functions marked "pinned" work on the memory of slots without the lock: one thread at a time owns a slot, from
 * admission to zp__link_offer() and from frame_take() to ring_sent(). */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "buffers.h"

static bool owns(const zp__attempt *attempt, uint32_t chunk)
{
	return zp__chunk_owner(&attempt->layout, chunk) == attempt->layout.rank;
}

/* Where a partial sum is computed, and from where it is sent on. */
static uint8_t *partial_at(const zp__attempt *attempt, const zp__span *span)
{
	bool aside = attempt->mode == ZP__SCATTER && !owns(attempt, span->chunk);
	return aside ? workspace_at(attempt, span) : output_at(attempt, span);
}

static uint8_t *wire_at(const zp__attempt *attempt, const zp__slot *slot)
{
	return attempt->wire.memory + slot_index(attempt, slot) * attempt->layout.wire_stride;
}

/* True if the body of a frame is received in the wire buffer, and sent from there. */
static bool in_wire(const zp__attempt *attempt, uint8_t kind)
{
	return attempt->quantised || (attempt->layout.sum_itemsize && kind == ZP__REDUCE_SCATTER);
}

/* The rank before the owner is the last to receive the result and does not send it on. */
static bool forwards_result(const zp__layout *l, uint32_t chunk)
{
	return zp__chunk_owner(l, chunk) != (l->rank + 1) % l->world_size;
}

/* Counts the frames to receive and to send, and queues our own chunk. */
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

/* Lock held. True if a connection is sending the frame of the slot at this moment; the frame that has come waits for
 * that. */
static bool is_being_sent(const zp__attempt *attempt, const zp__slot *slot)
{
	for (uint32_t i = 0; i < attempt->next->connection_count; i++) {
		zp__transmit *tx = &attempt->next->connections[i].tx;
		if (!tx->sending || tx->slot != slot)
			continue;
		tx->awaited = true;
		return true;
	}
	return false;
}

static enum zp__verdict slot_admit(zp__attempt *attempt, zp__slot *slot, const zp__frame *frame)
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
	if (!(slot->flags & ZP__SLOT_SENT) && is_being_sent(attempt, slot))
		return ZP__PARK;
	if (!(slot->flags & ZP__SLOT_REDUCED) || !(slot->flags & ZP__SLOT_SENT)) {
		zp__attempt_fail(attempt, -EPROTO, NULL);
		return ZP__DROP;
	}
	zp__list_remove(&slot->node); /* This result contains our share, so the frame that we sent has arrived. */
	slot->flags |= ZP__SLOT_LANDING;
	return ZP__ADMIT;
}

/* Where the body of a frame is received. NULL: in the connection's buffer. */
static uint8_t *landing_of(const zp__attempt *attempt, const zp__slot *slot, uint8_t kind)
{
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	if (in_wire(attempt, kind))
		return wire_at(attempt, slot);
	if (kind == ZP__ALL_GATHER || attempt->mode == ZP__OUT_OF_PLACE)
		return output_at(attempt, &span);
	return attempt->mode == ZP__SCATTER ? partial_at(attempt, &span) : NULL;
}

static enum zp__verdict ring_admit(zp__attempt *attempt, zp__receive *rx)
{
	const zp__frame *frame = &rx->frame;
	if (rx->link != attempt->previous)
		return ZP__VIOLATION;
	zp__slot *slot = slot_of(attempt, frame);
	if (!slot)
		return ZP__VIOLATION;
	enum zp__verdict verdict = slot_admit(attempt, slot, frame);
	if (verdict != ZP__ADMIT)
		return verdict;
	rx->slot = slot;
	rx->body = landing_of(attempt, slot, frame->kind);
	return ZP__ADMIT;
}

/* Provides a buffer for an admitted frame that needs one, and saves the old bytes that its body overwrites. -ENOMEM. */
static int ring_make_room(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	if (rx->body) {
		bool overwrites = rx->frame.kind == ZP__ALL_GATHER && !attempt->quantised;
		if (overwrites && attempt->mode == ZP__IN_PLACE_RESTORE) {
			zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, rx->slot));
			save(attempt, rx->slot, &span);
		}
		return 0;
	}
	if (rx->landing_bytes < rx->frame.length) {
		zp__memory_unmap(rx->landing, rx->landing_bytes);
		rx->landing_bytes = attempt->layout.wire_stride;
		rx->landing = zp__memory_map(rx->landing_bytes);
		if (!rx->landing) {
			rx->landing_bytes = 0;
			return -ENOMEM;
		}
	}
	rx->body = rx->landing;
	return 0;
}

/* Number of shares in a frame of this chunk once ours is added. */
static uint32_t shares_so_far(const zp__layout *l, uint32_t chunk)
{
	return (l->rank + l->world_size - zp__chunk_start(l, chunk)) % l->world_size + 1;
}

/* Adds our share to a received frame, in pieces that stay in the cache: saves the old bytes and computes the sum or
 * mean. Returns its checksum, or 0 if that is not needed. */
static uint64_t share_add(zp__attempt *attempt, zp__slot *slot, const zp__span *span, const uint8_t *landed,
			  bool owned)
{
	const zp_reduce_plan *plan = &attempt->plan;
	const zp__reduce_kernels *kernels = zp__reduce_kernels_of(zp__isa_best());
	const zp__wide_kernels *wide = &kernels->wide[plan->dtype];
	uint32_t shares = shares_so_far(&attempt->layout, span->chunk);
	bool averages = plan->op == ZP_AVG, means = averages && wide->mean;
	size_t bytes = span->elements * attempt->layout.itemsize, n;
	bool saves = attempt->mode == ZP__IN_PLACE_RESTORE;
	bool checks = owned ? attempt->layout.gathers : !attempt->next->encrypted;
	uint8_t *to = partial_at(attempt, span);
	zp__checksum so_far = {.bytes = 0};
	for (size_t done = 0; done < bytes; done += n) {
		n = bytes - done < ZP__PIECE_BYTES ? bytes - done : ZP__PIECE_BYTES;
		uint64_t elements = n / attempt->layout.itemsize;
		uint8_t *sum = to + done;
		if (saves)
			zp__copy_past_cache(workspace_at(attempt, span) + done, sum, n);
		const uint8_t *own = input_at(attempt, span) + done;
		if (means)
			wide->mean(sum, landed + done, own, elements, shares);
		else
			kernels->reduce[plan->dtype][plan->op](sum, landed + done, own, elements);
		if (owned && averages && !means)
			kernels->divide[plan->dtype](sum, elements, plan->world_size);
		if (checks)
			zp__checksum_advance(&so_far, to, done + n);
	}
	if (saves) {
		zp__copy_past_cache_done();
		mark(attempt, slot, ZP__SLOT_SAVED);
	}
	return checks ? zp__checksum_finish(&so_far, to, bytes) : 0;
}

/* Adds our share to a received wide sum. If we own the chunk, makes the mean in the output. Returns the checksum of the
 * frame to send on, or 0 if it is not needed. */
static uint64_t share_fold(zp__attempt *attempt, zp__slot *slot, const zp__span *span, uint8_t *sum, bool owned)
{
	const zp_reduce_plan *plan = &attempt->plan;
	const zp__wide_kernels *wide = &zp__reduce_kernels_of(zp__isa_best())->wide[plan->dtype];
	wide->fold[plan->op](sum, input_at(attempt, span), span->elements);
	if (!owned)
		return attempt->next->encrypted ? 0 : zp__checksum_of(sum, span->elements * attempt->layout.sum_itemsize);
	if (attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, span);
	wide->narrow(output_at(attempt, span), sum, span->elements, plan->world_size);
	return zp__checksum_of(output_at(attempt, span), span->elements * attempt->layout.itemsize);
}

static void share_landed(zp__receive *rx, zp__attempt *attempt, zp__slot *slot, const zp__span *span)
{
	bool owned = owns(attempt, span->chunk), forwards = !owned || attempt->layout.gathers;
	uint64_t checksum, result_checksum; /* the first: of the frame to send on; not needed if the link is encrypted */
	if (attempt->quantised) {
		zp__quantiser how = quantiser_of(&attempt->plan);
		uint32_t divisor = owned && attempt->plan.op == ZP_AVG ? attempt->plan.world_size : 1;
		zp__quantise_fold(zp__isa_best(), &how, rx->body, input_at(attempt, span), span->elements, divisor);
		checksum = attempt->next->encrypted ? 0 : zp__checksum_of(rx->body, rx->frame.length);
		result_checksum = owned ? result_dequantise(attempt, slot, span, rx->body) : 0;
	} else if (attempt->layout.sum_itemsize) {
		checksum = result_checksum = share_fold(attempt, slot, span, rx->body, owned);
	} else {
		checksum = result_checksum = share_add(attempt, slot, span, rx->body, owned);
	}
	zp_engine *engine = attempt->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->checksum = (uint32_t)checksum;
	slot->kind = owned ? ZP__ALL_GATHER : ZP__REDUCE_SCATTER;
	slot->flags |= ZP__SLOT_REDUCED | (owned ? ZP__SLOT_LANDING | ZP__SLOT_RESULT : 0);
	if (owned && forwards)
		attempt->digest += zp__digest_share(slot_index(attempt, slot), result_checksum);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending && forwards)
		zp__link_offer(attempt->next, attempt->flow, &slot->node);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&engine->mutex);
}

static void result_landed(zp__receive *rx, zp__attempt *attempt, zp__slot *slot, const zp__span *span)
{
	uint64_t checksum = attempt->quantised ? result_dequantise(attempt, slot, span, rx->body) : rx->checksum;
	zp_engine *engine = attempt->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->checksum = (uint32_t)rx->checksum;
	slot->kind = ZP__ALL_GATHER;
	slot->flags |= ZP__SLOT_RESULT;
	attempt->digest += zp__digest_share(slot_index(attempt, slot), checksum);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending && forwards_result(&attempt->layout, span->chunk))
		zp__link_offer(attempt->next, attempt->flow, &slot->node);
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&engine->mutex);
}

static void ring_landed(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	zp__slot *slot = rx->slot;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	if (rx->frame.kind == ZP__REDUCE_SCATTER)
		share_landed(rx, attempt, slot, &span);
	else
		result_landed(rx, attempt, slot, &span);
}

static const uint8_t *body_of(const zp__attempt *attempt, const zp__slot *slot, const zp__span *span)
{
	if (in_wire(attempt, slot->kind))
		return wire_at(attempt, slot);
	if (slot->kind == ZP__ALL_GATHER)
		return output_at(attempt, span);
	bool starts = zp__chunk_start(&attempt->layout, span->chunk) == attempt->layout.rank;
	return starts ? input_at(attempt, span) : partial_at(attempt, span);
}

/* Returns the checksum of a frame of our own chunk, or 0 if the link is encrypted. Also saves the old bytes of the
 * output, while they are in the cache. */
static uint64_t own_check(zp__attempt *attempt, zp__slot *slot, const zp__span *span)
{
	const uint8_t *body = input_at(attempt, span);
	size_t bytes = span->elements * attempt->layout.itemsize, n;
	bool checks = !attempt->next->encrypted;
	if (attempt->mode != ZP__IN_PLACE_RESTORE)
		return checks ? zp__checksum_of(body, bytes) : 0;
	zp__checksum so_far = {.bytes = 0};
	for (size_t done = 0; done < bytes; done += n) {
		n = bytes - done < ZP__PIECE_BYTES ? bytes - done : ZP__PIECE_BYTES;
		if (checks)
			zp__checksum_advance(&so_far, body, done + n);
		zp__copy_past_cache(workspace_at(attempt, span) + done, body + done, n);
	}
	zp__copy_past_cache_done();
	mark(attempt, slot, ZP__SLOT_SAVED);
	return checks ? zp__checksum_finish(&so_far, body, bytes) : 0;
}

/* Without a reduction (all-gather, broadcast): copies our input to the output. The digest counts it once, also if the
 * frame is prepared again for retransmission. */
static void own_result_make(zp__attempt *attempt, zp__slot *slot, const zp__span *span)
{
	size_t bytes = span->elements * attempt->layout.itemsize;
	uint8_t *to = output_at(attempt, span);
	const uint8_t *from = (const uint8_t *)attempt->plan.input + span->offset * attempt->layout.itemsize;
	if (to != from)
		memcpy(to, from, bytes);
	uint64_t checksum = zp__checksum_of(to, bytes);
	zp_engine *engine = attempt->engine;
	pthread_mutex_lock(&engine->mutex);
	slot->checksum = (uint32_t)checksum;
	if (!(slot->flags & ZP__SLOT_RESULT))
		attempt->digest += zp__digest_share(slot_index(attempt, slot), checksum);
	slot->flags |= ZP__SLOT_RESULT;
	pthread_mutex_unlock(&engine->mutex);
}

/* Quantises or widens our input. */
static void own_share_make(zp__attempt *attempt, zp__slot *slot, const zp__span *span)
{
	const zp_reduce_plan *plan = &attempt->plan;
	uint8_t *wire = wire_at(attempt, slot);
	if (attempt->quantised) {
		zp__quantiser how = quantiser_of(plan);
		zp__quantise(zp__isa_best(), &how, wire, input_at(attempt, span), span->elements);
	} else {
		const zp__reduce_kernels *kernels = zp__reduce_kernels_of(zp__isa_best());
		kernels->wide[plan->dtype].widen(wire, input_at(attempt, span), span->elements);
	}
}

/* Makes the header and body of the frame in c->tx. Frames of our own chunk are quantised, widened and checksummed here,
 * just before they are sent. */
static void ring_prepare(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	zp__attempt *attempt = tx->attempt;
	zp__slot *slot = tx->slot;
	const zp__layout *l = &attempt->layout;
	zp__span span = zp__slot_span(l, slot_index(attempt, slot));
	const uint8_t *body = body_of(attempt, slot, &span);
	if (!l->reduces && owns(attempt, span.chunk))
		own_result_make(attempt, slot, &span);
	if (slot->kind == ZP__REDUCE_SCATTER && zp__chunk_start(l, span.chunk) == l->rank) {
		if (in_wire(attempt, slot->kind)) {
			own_share_make(attempt, slot, &span);
			uint64_t bytes = frame_length(l, slot->kind, span.elements);
			slot->checksum = c->records ? 0 : (uint32_t)zp__checksum_of(body, bytes);
		} else {
			slot->checksum = (uint32_t)own_check(attempt, slot, &span);
		}
	}
	frame_fill(tx, &span, body);
}

static void ring_sent(zp__attempt *attempt, zp__slot *slot)
{
	attempt->tx_remaining--;
	if (slot->kind == ZP__REDUCE_SCATTER) {
		slot->flags |= ZP__SLOT_SENT;
		link_unpark(attempt, attempt->previous);
	}
	zp__attempt_progress(attempt);
}

static void ring_unsent(zp__attempt *attempt, zp__slot *slot)
{
	attempt->tx_remaining++;
	if (slot->kind == ZP__REDUCE_SCATTER)
		slot->flags &= (uint8_t)~ZP__SLOT_SENT;
}

/* The other end will retransmit the frame that was cut off. */
static void ring_cut(zp__receive *rx)
{
	rx->slot->flags &= (uint8_t)~(rx->frame.kind == ZP__REDUCE_SCATTER ? ZP__SLOT_ARRIVING : ZP__SLOT_LANDING);
}

static int ring_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	bool wired = in_wire(attempt, ZP__REDUCE_SCATTER);
	return zp__region_take(attempt->engine, wired ? l->slot_count * l->wire_stride : 0, &attempt->wire);
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
