/* Lanes of trees of one attempt. Each lane of an all-reduce reduces its part of the tensor up a tree of all ranks and
 * sends the result down it, slot by slot:
 *
 *   a leaf    sends its share of a slot to its parent (a reduce-scatter frame);
 *   others    wait for the shares of all their children, and reduce these and their own input in order of rank, so that
 *             the result does not depend on the order of arrival. That makes their share, which they send to their
 *             parent;
 *   the root  makes the result in the same way, and sends it to its children (all-gather frames), which forward it
 *             unchanged.
 *
 * The thread that receives the last share of a slot reduces the slot. The direct exchange is the case of one star for
 * each rank, all of the same length: rank j is the parent of all others in lane j. That takes two hops, for any number
 * of ranks, and two roundings if the tensor is quantised.
 *
 * Other collectives have only one of the two phases: a reduce-scatter sums a part up to its owner, an all-gather sends
 * a row down from its owner, a broadcast sends the whole tensor down. The frames of the other phase are sent all the
 * same, without bodies, so that the proofs below hold for all collectives. In a lane that does not reduce, the root
 * copies its input to the output once all others have asked for it with such an empty share. In a lane without results,
 * only the root writes its output.
 *
 *   mode              | shares are    | the share of an inner rank   | a result
 *                     | received in   | is made in, and sent from    |
 *   not quantised     | `shares`      | the buffer of the share of   | is made or received in the output, and sent from there
 *                     |               | its first child              |
 *   quantised         | `shares`      | `wire`, where a leaf         | is made or received in `wire`, sent from there, and
 *                     |               | quantises its share          | dequantised to the output
 *
 * In place with restore, the old bytes of the output are saved to the workspace before a result overwrites them.
 *
 * AVG. A share that has been reduced is
 *   float, double, 64-bit integers, quantised     the sum, which the root divides
 *   16-bit floats                                 the mean of its inputs, whose number is its weight: no sum overflows
 *   narrower integers                             never sent: a sum does not fit, a mean is too coarse; so only stars
 *                                                 are legal (lanes.c)
 *
 * The window. Besides the workspace and the slots themselves, an attempt needs buffers for a window of slots of each
 * lane: at most ZP__TREES_WINDOW_BYTES on any rank, whatever the size of the tensor. The window of a lane is in
 * proportion to its length, so that no lane is held back more than another. All ranks compute the same windows from the
 * same plan. A leaf queues the shares of the first `window` slots; each result of slot s that it receives lets it queue
 * the share of slot s + window. Inner ranks need no such rule: their shares are never ahead of the slowest leaf below
 * them. Therefore, when the share of slot s + window arrives from a child,
 *   - that child has received the result of slot s, because all leaves below it got the result through it. The child
 *     got it from us, and we, unless we are the root, from our parent, which must have had our share of slot s. Hence
 *     the buffer of the child's share of slot s may be overwritten: its bytes were reduced, and our own share, if it
 *     was made there, has arrived;
 * and when the shares of slot s + window have arrived from all children,
 *   - all of them have received the result of slot s: its buffer in `wire` may be overwritten.
 * In `wire`, the result of a slot overwrites our share of it: the result contains the share, which has therefore
 * arrived. The share of a leaf overwrites a result, which the leaf dequantised before it queued that share.
 *
 * Why it cannot deadlock. No frame on a connection waits for another frame, of its own or of another attempt: by the
 * rules above there is a free buffer for each share that arrives, and for each result, because our share of its slot
 * was sent. (If the sending thread has not recorded that yet, the frame waits some microseconds for that thread, which
 * waits for nothing. Frames of an attempt that is not begun here are kept or not sent yet: early.c. Frames that are due
 * earlier go first, and a frame may wait for its time: pace.c.) So every queued frame reaches its receiver. Leaves
 * queue their shares of slots below `window` at the start, and the share of slot s when the result of slot s - window
 * has arrived. By induction over slots, and within a slot from the leaves up and from the root down, all shares and
 * results arrive.
 *
 * A buffer is overwritten only after the frame that was sent from it has arrived: a result proves that the share
 * arrived, and a share one window later proves that the result arrived. So every frame that may not have arrived can be
 * sent again.
 *
 * The functions marked "pinned" work on the memory of slots without the lock: by the same rules only one thread at a
 * time uses a buffer. */
#include <errno.h>
#include <stdlib.h>

#include "buffers.h"
#include "lanes.h"
#include "pace.h"

#define NO_PARENT UINT32_MAX

static uint8_t no_bytes[1]; /* The body of an empty frame. Nobody reads or writes it. */

/* Our part in the tree of a lane. */
struct zp__tree {
	uint32_t parent; /* its number among our neighbours, or NO_PARENT */
	uint32_t child_count;
	const uint32_t *children; /* their numbers, in order of rank */
	zp__join join;
	uint64_t window; /* slots of the lane that are in flight at the same time */
	/* Index of this lane's first copy, first buffer in `shares` and first buffer in `wire`. */
	uint64_t first_copy, first_share, first_wire;
};

/* --- Slots and buffers -------------------------------------------------------------------------------------------- */

static zp__slot *slot_at(const zp__attempt *attempt, uint32_t lane, uint64_t number)
{
	return attempt->slots + zp__chunk_first_slot(&attempt->layout, lane) + number;
}

/* Index of a slot in its lane. */
static uint64_t slot_number(const zp__attempt *attempt, const zp__slot *slot, uint32_t lane)
{
	return slot_index(attempt, slot) - zp__chunk_first_slot(&attempt->layout, lane);
}

static zp__slot *copy_of(const zp__attempt *attempt, const zp__tree *tree, uint64_t number, uint32_t child)
{
	return attempt->copies + tree->first_copy + number * tree->child_count + child;
}

static bool is_copy(const zp__attempt *attempt, const zp__slot *slot)
{
	return attempt->copies && slot >= attempt->copies && slot < attempt->copies + attempt->copy_count;
}

/* The tree of a copy; sets the numbers of its slot and of its child. */
static const zp__tree *copy_find(const zp__attempt *attempt, const zp__slot *copy, uint64_t *number, uint32_t *child)
{
	const zp__tree *tree = &attempt->trees[copy->lane];
	uint64_t index = (uint64_t)(copy - attempt->copies) - tree->first_copy;
	*number = index / tree->child_count;
	*child = (uint32_t)(index % tree->child_count);
	return tree;
}

/* The child at the other end of a link; child_count: none. */
static uint32_t child_at(const zp__tree *tree, uint32_t neighbour)
{
	uint32_t child = 0;
	while (child < tree->child_count && tree->children[child] != neighbour)
		child++;
	return child;
}

/* The buffer of a child's share. */
static uint8_t *share_at(const zp__attempt *attempt, const zp__tree *tree, uint64_t number, uint32_t child)
{
	uint64_t at = tree->first_share + number % tree->window * tree->child_count + child;
	return attempt->shares.memory + at * attempt->layout.wire_stride;
}

/* The buffer of the quantised bytes of a slot. */
static uint8_t *wire_at(const zp__attempt *attempt, const zp__tree *tree, uint64_t number)
{
	return attempt->wire.memory + (tree->first_wire + number % tree->window) * attempt->layout.wire_stride;
}

/* Where a result is received, and from where it is sent. */
static uint8_t *result_at(const zp__attempt *attempt, const zp__tree *tree, uint64_t number, const zp__span *span)
{
	if (!attempt->layout.gathers)
		return no_bytes;
	return attempt->quantised ? wire_at(attempt, tree, number) : output_at(attempt, span);
}

/* Where our share is made from the children's shares, and from where it is sent. */
static uint8_t *partial_at(const zp__attempt *attempt, const zp__tree *tree, uint64_t number)
{
	return attempt->quantised ? wire_at(attempt, tree, number) : share_at(attempt, tree, number, 0);
}

/* --- Start -------------------------------------------------------------------------------------------------------- */

/* Sets the fields of a tree that do not depend on slots. Writes the numbers of children and inputs to `numbers`, and
 * returns the end of them. */
static uint32_t *tree_make(const zp__attempt *attempt, zp__tree *tree, uint32_t lane, uint32_t *numbers)
{
	const zp_reduce_plan *plan = &attempt->plan;
	uint32_t rank = plan->rank, parent = zp__parent_of(plan, lane, rank), counts[ZP__WORLD_SIZE_MAX];
	bool averages = plan->op == ZP_AVG, halves = plan->dtype == ZP_FLOAT16 || plan->dtype == ZP_BFLOAT16;
	bool means = averages && halves && plan->lanes && !attempt->quantised;
	tree->parent = NO_PARENT;
	tree->children = numbers;
	for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
		uint32_t other = attempt->neighbours[i].rank;
		if (other == parent)
			tree->parent = i;
		if (zp__parent_of(plan, lane, other) != rank)
			continue;
		numbers[tree->child_count++] = i;
		tree->join.place += other < rank;
	}
	numbers += tree->child_count;
	tree->join.count = tree->child_count + 1;
	tree->join.divisor = averages && parent == rank ? plan->world_size : 1;
	if (!means)
		return numbers;
	zp__tree_count(plan->lanes[lane].parents, plan->world_size, counts);
	tree->join.divisor = counts[rank];
	tree->join.inputs = numbers;
	for (uint32_t i = 0; i < tree->child_count; i++)
		*numbers++ = counts[attempt->neighbours[tree->children[i]].rank];
	return numbers;
}

static int copies_make(zp__attempt *attempt)
{
	if (!attempt->copy_count)
		return 0;
	attempt->copies = calloc(attempt->copy_count, sizeof *attempt->copies);
	if (!attempt->copies)
		return -ENOMEM;
	for (uint32_t lane = 0; lane < attempt->layout.chunks; lane++) {
		const zp__tree *tree = &attempt->trees[lane];
		uint64_t slots = zp__chunk_slots(&attempt->layout, lane);
		for (uint64_t i = 0; i < slots * tree->child_count; i++) {
			zp__slot *copy = attempt->copies + tree->first_copy + i;
			zp__list_init(&copy->node);
			copy->lane = (uint16_t)lane;
		}
		for (uint64_t i = 0; i < slots; i++)
			slot_at(attempt, lane, i)->missing = (uint16_t)tree->child_count;
	}
	return 0;
}

static int trees_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	zp__need need = zp__lanes_need(&attempt->plan);
	uint64_t room = ZP__TREES_WINDOW_BYTES / l->wire_stride, shares = 0, wires = 0;
	attempt->trees = calloc(1, l->chunks * sizeof *attempt->trees + 2 * need.buffers * sizeof(uint32_t));
	if (!attempt->trees)
		return -ENOMEM;
	uint32_t *numbers = (uint32_t *)(attempt->trees + l->chunks);
	for (uint32_t lane = 0; lane < l->chunks; lane++) {
		zp__tree *tree = &attempt->trees[lane];
		uint64_t slots = zp__chunk_slots(l, lane), elements = zp__chunk_elements(l, lane);
		if (!slots)
			continue;
		numbers = tree_make(attempt, tree, lane, numbers);
		/* One slot, and a share of the remaining room: at most `room` on any rank (layout_make). */
		uint64_t window = 1 + elements * (room - need.buffers) / need.elements;
		tree->window = window < slots ? window : slots;
		tree->first_copy = attempt->copy_count;
		tree->first_share = shares;
		tree->first_wire = wires;
		attempt->copy_count += slots * tree->child_count;
		shares += tree->window * tree->child_count;
		wires += attempt->quantised ? tree->window : 0;
	}
	int rc = copies_make(attempt);
	if (rc == 0)
		rc = zp__region_take(attempt->engine, shares * l->wire_stride, &attempt->shares);
	return rc < 0 ? rc : zp__region_take(attempt->engine, wires * l->wire_stride, &attempt->wire);
}

/* When a frame is due if all lanes progress evenly: a number that grows in the course of the attempt. */
static uint64_t due_of(const zp__attempt *attempt, const zp__slot *slot)
{
	uint32_t lane = slot->lane, child;
	uint64_t number;
	if (is_copy(attempt, slot)) {
		copy_find(attempt, slot, &number, &child);
	} else {
		lane = zp__slot_span(&attempt->layout, slot_index(attempt, slot)).chunk;
		number = slot_number(attempt, slot, lane);
	}
	return ((2 * number + 1) << 20) / zp__chunk_slots(&attempt->layout, lane);
}

/* The first frame of a queue that is due later than a new one, or the end of the queue. */
static zp__list *later_frame(const zp__attempt *attempt, zp__list *frames, const zp__slot *slot)
{
	uint64_t due = due_of(attempt, slot);
	if (zp__list_empty(frames) || due_of(attempt, ZP__ELEMENT(frames->previous, zp__slot, node)) <= due)
		return frames;
	zp__list *next = frames->next;
	while (due_of(attempt, ZP__ELEMENT(next, zp__slot, node)) <= due)
		next = next->next;
	return next;
}

/* Queues a frame; in a plan with a pace, behind the frames that are due before it. Otherwise the shares, which are ready
 * first, are all sent first, so hosts with few shares to send idle at first, and those with few results at the end. But
 * links that progress evenly show less of what they can carry, which plans without a pace have to learn. */
static void offer(zp__attempt *attempt, uint32_t neighbour, zp__slot *slot, enum zp__frame_kind kind)
{
	zp__neighbour *to = &attempt->neighbours[neighbour];
	zp__list *frames = &to->flow.frames;
	slot->kind = (uint8_t)kind;
	slot->flags |= ZP__SLOT_REDUCED;
	zp__list *next = attempt->plan.pace_us ? later_frame(attempt, frames, slot) : frames;
	zp__link_offer_before(to->link, &to->flow, next, &slot->node);
}

/* Queues our share of a slot. */
static void share_offer(zp__attempt *attempt, uint32_t lane, uint64_t number)
{
	offer(attempt, attempt->trees[lane].parent, slot_at(attempt, lane, number), ZP__REDUCE_SCATTER);
}

/* Queues the result of a slot for all children. */
static void result_offer(zp__attempt *attempt, const zp__tree *tree, uint64_t number)
{
	for (uint32_t i = 0; i < tree->child_count; i++) {
		/* Start with the next rank: if all started with the first, it would get everything at once. */
		uint32_t child = (tree->join.place + i) % tree->child_count;
		offer(attempt, tree->children[child], copy_of(attempt, tree, number, child), ZP__ALL_GATHER);
	}
}

/* How many frames go to a neighbour. */
static uint64_t frames_to(const zp__attempt *attempt, uint32_t neighbour)
{
	uint64_t frames = 0;
	for (uint32_t lane = 0; lane < attempt->layout.chunks; lane++) {
		const zp__tree *tree = &attempt->trees[lane];
		if (tree->parent == neighbour || child_at(tree, neighbour) < tree->child_count)
			frames += zp__chunk_slots(&attempt->layout, lane);
	}
	return frames;
}

static void trees_start(zp__attempt *attempt)
{
	for (uint32_t i = 0; attempt->plan.pace_us && i < attempt->neighbour_count; i++)
		zp__pace_start(&attempt->neighbours[i].flow, attempt->plan.pace_us, frames_to(attempt, i));
	uint64_t longest = 0;
	for (uint32_t lane = 0; lane < attempt->layout.chunks; lane++) {
		const zp__tree *tree = &attempt->trees[lane];
		uint64_t frames = tree->child_count + (tree->parent != NO_PARENT);
		attempt->rx_remaining += frames * zp__chunk_slots(&attempt->layout, lane);
		longest = tree->window > longest ? tree->window : longest;
	}
	attempt->tx_remaining = attempt->rx_remaining;
	for (uint64_t number = 0; number < longest; number++) /* All lanes begin, even if they share a link. */
		for (uint32_t lane = 0; lane < attempt->layout.chunks; lane++)
			if (!attempt->trees[lane].child_count && number < attempt->trees[lane].window)
				share_offer(attempt, lane, number);
}

/* --- Frames that come --------------------------------------------------------------------------------------------- */

static enum zp__verdict share_admit(zp__attempt *attempt, zp__receive *rx, const zp__tree *tree, uint32_t neighbour)
{
	uint32_t child = child_at(tree, neighbour);
	if (child == tree->child_count)
		return ZP__VIOLATION;
	uint64_t number = slot_number(attempt, rx->slot, rx->frame.chunk);
	zp__slot *copy = copy_of(attempt, tree, number, child);
	if (copy->flags & ZP__SLOT_ARRIVING)
		return ZP__VIOLATION;
	if (number >= tree->window) {
		zp__slot *before = copy_of(attempt, tree, number - tree->window, child);
		if (!(before->flags & ZP__SLOT_REDUCED))
			return ZP__VIOLATION;
		if (!(before->flags & ZP__SLOT_SENT))
			return ZP__PARK;
		zp__list_remove(&before->node); /* The result of that slot has arrived. */
	}
	copy->flags |= ZP__SLOT_ARRIVING;
	rx->body = share_at(attempt, tree, number, child);
	return ZP__ADMIT;
}

static enum zp__verdict result_admit(zp__attempt *attempt, zp__receive *rx, const zp__tree *tree, uint32_t neighbour)
{
	zp__slot *slot = rx->slot;
	if (neighbour != tree->parent || slot->flags & ZP__SLOT_LANDING || !(slot->flags & ZP__SLOT_REDUCED))
		return ZP__VIOLATION;
	if (!(slot->flags & ZP__SLOT_SENT))
		return ZP__PARK;
	zp__list_remove(&slot->node); /* This result contains our share, so the share has arrived. */
	slot->flags |= ZP__SLOT_LANDING;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	rx->body = result_at(attempt, tree, slot_number(attempt, slot, span.chunk), &span);
	return ZP__ADMIT;
}

static enum zp__verdict trees_admit(zp__attempt *attempt, zp__receive *rx)
{
	uint32_t neighbour = neighbour_at(attempt, rx->link);
	zp__slot *slot = slot_of(attempt, &rx->frame);
	if (neighbour == attempt->neighbour_count || !slot)
		return ZP__VIOLATION;
	rx->slot = slot;
	bool is_share = rx->frame.kind == ZP__REDUCE_SCATTER;
	return (is_share ? share_admit : result_admit)(attempt, rx, &attempt->trees[rx->frame.chunk], neighbour);
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

/* slot_join() for a lane that does not reduce: the root's input is the result; others have nothing to add. */
static uint64_t slot_take(zp__attempt *attempt, const zp__span *span, bool is_result)
{
	if (!is_result)
		return zp__checksum_of(no_bytes, 0);
	uint8_t *output = output_at(attempt, span);
	size_t bytes = span->elements * attempt->layout.itemsize;
	if (attempt->mode == ZP__OUT_OF_PLACE)
		memcpy(output, (const uint8_t *)attempt->plan.input + span->offset * attempt->layout.itemsize, bytes);
	return zp__checksum_of(output, bytes);
}

/* Reduces a slot whose shares have all arrived. Returns the checksum of the frames that carry the reduced share or
 * result. For a result, sets `result_checksum` to the checksum of its bytes in the output. */
static uint64_t slot_join(zp__attempt *attempt, zp__slot *slot, const zp__span *span, uint64_t *result_checksum)
{
	const zp__tree *tree = &attempt->trees[span->chunk];
	uint64_t number = slot_number(attempt, slot, span->chunk);
	bool is_result = tree->parent == NO_PARENT;
	uint8_t *to = partial_at(attempt, tree, number);
	if (!attempt->layout.reduces)
		return *result_checksum = slot_take(attempt, span, is_result);
	if (attempt->quantised) {
		const uint8_t *shares[ZP__WORLD_SIZE_MAX];
		for (uint32_t i = 0; i < tree->child_count; i++)
			shares[i] = share_at(attempt, tree, number, i);
		zp__quantiser how = quantiser_of(&attempt->plan);
		zp__quantise_join(zp__isa_best(), &how, to, shares, tree->join.count, tree->join.place,
				  input_at(attempt, span), span->elements, tree->join.divisor);
		if (is_result)
			*result_checksum = result_dequantise(attempt, slot, span, to);
		return zp__checksum_of(to, zp__wire_bytes(&attempt->layout, span->elements));
	}
	if (is_result && attempt->mode == ZP__IN_PLACE_RESTORE)
		save(attempt, slot, span);
	*result_checksum = zp__shares_join(attempt, &tree->join, is_result ? output_at(attempt, span) : to,
					   input_at(attempt, span), share_at(attempt, tree, number, 0), span->elements);
	return is_result && !attempt->layout.gathers ? zp__checksum_of(no_bytes, 0) : *result_checksum;
}

/* Lock held. Adds a result to the digest; not in a reduce-scatter, where no other peer has it. */
static void digest_add(zp__attempt *attempt, const zp__slot *slot, uint64_t checksum)
{
	if (attempt->layout.gathers)
		attempt->digest += zp__digest_share(slot_index(attempt, slot), checksum);
}

static void share_landed(zp__attempt *attempt, zp__slot *slot)
{
	pthread_mutex_lock(&attempt->engine->mutex);
	bool last = --slot->missing == 0;
	attempt->rx_remaining -= !last; /* The last share counts once all are reduced. */
	pthread_mutex_unlock(&attempt->engine->mutex);
	if (!last)
		return;
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	const zp__tree *tree = &attempt->trees[span.chunk];
	uint64_t result_checksum, checksum = slot_join(attempt, slot, &span, &result_checksum);
	uint64_t number = slot_number(attempt, slot, span.chunk);
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->checksum = (uint32_t)checksum;
	attempt->rx_remaining--;
	bool goes_on = attempt->status == 0 && !attempt->ending;
	if (tree->parent == NO_PARENT) {
		slot->flags |= ZP__SLOT_RESULT;
		digest_add(attempt, slot, result_checksum);
		if (goes_on)
			result_offer(attempt, tree, number);
	} else if (goes_on) {
		share_offer(attempt, span.chunk, number);
	}
	zp__attempt_progress(attempt);
	pthread_mutex_unlock(&attempt->engine->mutex);
}

static void result_landed(zp__receive *rx, zp__attempt *attempt, zp__slot *slot)
{
	zp__span span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
	const zp__tree *tree = &attempt->trees[span.chunk];
	uint64_t checksum = attempt->quantised ? result_dequantise(attempt, slot, &span, rx->body) : rx->checksum;
	uint64_t number = slot_number(attempt, slot, span.chunk), next = number + tree->window;
	pthread_mutex_lock(&attempt->engine->mutex);
	slot->checksum = (uint32_t)rx->checksum;
	slot->flags |= ZP__SLOT_RESULT;
	digest_add(attempt, slot, checksum);
	attempt->rx_remaining--;
	if (attempt->status == 0 && !attempt->ending) {
		if (tree->child_count)
			result_offer(attempt, tree, number);
		else if (next < zp__chunk_slots(&attempt->layout, span.chunk))
			share_offer(attempt, span.chunk, next);
	}
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

static void trees_cut(zp__receive *rx)
{
	zp__attempt *attempt = rx->attempt;
	zp__slot *slot = rx->slot;
	if (rx->frame.kind == ZP__ALL_GATHER) {
		slot->flags &= (uint8_t)~ZP__SLOT_LANDING;
		return;
	}
	const zp__tree *tree = &attempt->trees[rx->frame.chunk];
	uint32_t child = child_at(tree, neighbour_at(attempt, rx->link));
	copy_of(attempt, tree, slot_number(attempt, slot, rx->frame.chunk), child)->flags &= (uint8_t)~ZP__SLOT_ARRIVING;
}

/* --- Frames that go ----------------------------------------------------------------------------------------------- */

/* Makes the body of the share of a leaf: the thread that is about to send it quantises and checksums it. */
static const uint8_t *leaf_prepare(zp__attempt *attempt, zp__slot *slot, const zp__span *span, bool encrypted)
{
	if (!attempt->layout.reduces) {
		slot->checksum = (uint32_t)zp__checksum_of(no_bytes, 0);
		return no_bytes;
	}
	const uint8_t *body = input_at(attempt, span);
	if (attempt->quantised) {
		zp__quantiser how = quantiser_of(&attempt->plan);
		uint64_t number = slot_number(attempt, slot, span->chunk);
		uint8_t *wire = wire_at(attempt, &attempt->trees[span->chunk], number);
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
	zp__slot *slot = tx->slot;
	const uint8_t *body;
	zp__span span;
	if (is_copy(attempt, slot)) {
		uint64_t number;
		uint32_t child;
		const zp__tree *tree = copy_find(attempt, slot, &number, &child);
		zp__slot *result = slot_at(attempt, slot->lane, number);
		slot->checksum = result->checksum;
		span = zp__slot_span(&attempt->layout, slot_index(attempt, result));
		body = result_at(attempt, tree, number, &span);
	} else {
		span = zp__slot_span(&attempt->layout, slot_index(attempt, slot));
		const zp__tree *tree = &attempt->trees[span.chunk];
		body = !tree->child_count ? leaf_prepare(attempt, slot, &span, c->records != NULL)
					  : partial_at(attempt, tree, slot_number(attempt, slot, span.chunk));
	}
	frame_fill(tx, &span, body);
}

static void trees_sent(zp__attempt *attempt, zp__slot *slot)
{
	uint32_t neighbour;
	if (is_copy(attempt, slot)) {
		uint64_t number;
		const zp__tree *tree = copy_find(attempt, slot, &number, &neighbour);
		neighbour = tree->children[neighbour];
	} else {
		neighbour = attempt->trees[zp__slot_span(&attempt->layout, slot_index(attempt, slot)).chunk].parent;
	}
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

const zp__algorithm zp__trees = {.allocate = trees_allocate,
				 .start = trees_start,
				 .admit = trees_admit,
				 .make_room = trees_make_room,
				 .landed = trees_landed,
				 .prepare = trees_prepare,
				 .sent = trees_sent,
				 .unsent = trees_unsent,
				 .cut = trees_cut};
