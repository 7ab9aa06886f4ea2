/* Attempts: start, failure, stall, end.
 *
 *   zp_reduce_start            all frames sent and received          zp_reduce_end
 *  ----------------> running ------------------------------> done ---------------------> freed
 *                       |                                                                ^
 *                       +--- link lost, stall --> failed --------------------------------+
 *                       +----------------------------------------------------------------+
 *
 * An attempt is in the table of attempts from start to end. Only threads that hold a pin touch its memory and the
 * caller's; once `ending` is set and no pins are left, only the thread in zp_reduce_end() or zp_engine_stop() does. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "attempt.h"
#include "buffers.h"
#include "early.h"
#include "engine.h"
#include "lanes.h"
#include "message.h"
#include "quantise.h"
#include "reduce.h"
#include "sock.h"

zp__attempt *zp__attempt_find(zp_engine *engine, uint64_t id)
{
	ZP__EACH(node, &engine->attempts[id % ZP__ATTEMPT_BUCKETS])
	{
		zp__attempt *attempt = ZP__ELEMENT(node, zp__attempt, node);
		if (attempt->plan.attempt == id)
			return attempt;
	}
	return NULL;
}

static bool overlap(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
	uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
	return x < y ? y - x < a_bytes : x - y < b_bytes;
}

/* True if `owners` has every rank once or, for a broadcast, is one valid rank. */
static bool owners_valid(const zp_reduce_plan *p)
{
	bool by_rank = p->kind == ZP_ALL_REDUCE || p->kind == ZP_ALL_TO_ALL;
	if (by_rank || !p->owners)
		return by_rank == !p->owners;
	if (p->kind == ZP_BROADCAST)
		return p->owners[0] < p->world_size;
	bool seen[ZP__WORLD_SIZE_MAX] = {false};
	for (uint32_t i = 0; i < p->world_size; i++) {
		if (p->owners[i] >= p->world_size || seen[p->owners[i]])
			return false;
		seen[p->owners[i]] = true;
	}
	return true;
}

static uint64_t output_elements(const zp_reduce_plan *p)
{
	if (p->kind == ZP_ALL_GATHER)
		return p->count * p->world_size;
	if (p->kind != ZP_REDUCE_SCATTER)
		return p->count;
	uint32_t part = 0;
	while (p->owners[part] != p->rank)
		part++;
	return zp__part_elements(p, part);
}

static int buffers_check(const zp_reduce_plan *p)
{
	uint64_t outputs = output_elements(p), itemsize = zp__itemsize[p->dtype];
	if (outputs > ZP__ELEMENTS_MAX || !p->input || (!p->output && outputs))
		return -EINVAL;
	if (p->input == p->output)
		return p->kind == ZP_ALL_REDUCE || p->kind == ZP_BROADCAST ? 0 : -EINVAL;
	if (p->kind == ZP_BROADCAST || overlap(p->input, p->count * itemsize, p->output, outputs * itemsize))
		return -EINVAL;
	return 0;
}

static int plan_check(const zp_reduce_plan *p)
{
	if (p->kind >= ZP_KINDS || p->dtype >= ZP__DTYPES || p->op >= ZP__OPS)
		return -EINVAL;
	if (p->quantization > ZP_QUANTIZE_ZERO_POINT_SCALE)
		return -EINVAL;
	if (p->world_size < 2 || p->world_size > ZP__WORLD_SIZE_MAX || p->rank >= p->world_size)
		return -EINVAL;
	if (p->frame_bytes < ZP__FRAME_BYTES_MIN || p->frame_bytes > ZP__FRAME_BYTES_MAX)
		return -EINVAL;
	if (p->algorithm < ZP_RING || p->algorithm > ZP_ONE_SHOT || !p->peers)
		return -EINVAL;
	bool exchanges = p->kind == ZP_ALL_TO_ALL || p->lanes;
	if (p->kind != ZP_ALL_REDUCE && p->algorithm != (exchanges ? ZP_DIRECT : ZP_RING))
		return -EINVAL;
	if (p->kind == ZP_ALL_TO_ALL && p->count % p->world_size)
		return -EINVAL;
	if (p->count < 1 || p->count > ZP__ELEMENTS_MAX || !owners_valid(p) || !zp__lanes_valid(p) || buffers_check(p) < 0)
		return -EINVAL;
	if (p->algorithm == ZP_ONE_SHOT && p->count * zp__itemsize[p->dtype] > ZP_ONE_SHOT_BYTES_MAX / (p->world_size - 1))
		return -EINVAL;
	if (p->quantization == ZP_QUANTIZE_NONE)
		return 0;
	if (p->kind != ZP_ALL_REDUCE || p->algorithm == ZP_ONE_SHOT)
		return -EINVAL;
	zp__quantiser how = quantiser_of(p);
	return zp__quantise_check(&how);
}

/* Sets the number and size of the chunks. Each lane is a chunk. Without lanes, a broadcast and a one-shot exchange have
 * one chunk of `count` elements, an all-gather has world_size such chunks, and other collectives share `count` elements
 * among world_size chunks. */
static void layout_cut(const zp_reduce_plan *p, zp__layout *l)
{
	l->reduces = zp__plan_reduces(p);
	l->gathers = p->kind != ZP_REDUCE_SCATTER && p->kind != ZP_ALL_TO_ALL;
	bool whole = p->kind == ZP_BROADCAST || p->algorithm == ZP_ONE_SHOT;
	l->chunks = p->lanes ? p->lane_count : whole ? 1 : p->world_size;
	bool shares = (l->reduces && p->algorithm != ZP_ONE_SHOT) || p->kind == ZP_ALL_TO_ALL;
	l->chunk_elements = shares ? p->count / p->world_size : p->count;
	l->long_chunks = l->reduces && shares && !p->lanes ? p->count % p->world_size : 0;
	for (uint32_t i = 0; i < p->lane_count; i++)
		if (p->lanes[i].elements > l->chunk_elements || i == 0)
			l->chunk_elements = p->lanes[i].elements;
}

static int lanes_cut(const zp_reduce_plan *p, zp__layout *l)
{
	l->cuts = calloc(l->chunks + 1, sizeof *l->cuts);
	if (!l->cuts)
		return -ENOMEM;
	for (uint32_t i = 0; i < l->chunks; i++) {
		uint64_t slots = (p->lanes[i].elements + l->frame_elements - 1) / l->frame_elements;
		l->cuts[i + 1].position = l->cuts[i].position + p->lanes[i].elements;
		l->cuts[i + 1].first_slot = l->cuts[i].first_slot + slots;
	}
	return 0;
}

static int layout_make(const zp_reduce_plan *p, zp__layout *l)
{
	*l = (zp__layout){.world_size = p->world_size, .rank = p->rank, .itemsize = zp__itemsize[p->dtype]};
	layout_cut(p, l);
	/* For a mean of integers a ring sends partial sums in a wider type. Two peers send no sums. */
	if (p->algorithm == ZP_RING && l->reduces && p->op == ZP_AVG && p->dtype < ZP_UINT64 && p->world_size > 2)
		l->sum_itemsize = zp__wide_itemsize[p->dtype];
	uint64_t longest = l->chunk_elements + (l->long_chunks > 0), frame_bytes = p->frame_bytes;
	zp__need need = {0};
	if (p->algorithm == ZP_DIRECT) {
		need = zp__lanes_need(p);
		uint64_t fair = ZP__TREES_WINDOW_BYTES / ZP__TREES_WINDOW_SLOTS / need.buffers;
		fair = fair > ZP__FRAME_BYTES_MIN ? fair : ZP__FRAME_BYTES_MIN;
		frame_bytes = frame_bytes < fair ? frame_bytes : fair;
	}
	l->frame_elements = frame_bytes / (l->sum_itemsize ? l->sum_itemsize : l->itemsize);
	if (l->frame_elements > longest)
		l->frame_elements = longest;
	if (p->quantization != ZP_QUANTIZE_NONE) {
		zp__quantiser how = quantiser_of(p);
		l->block_elements = p->block_elements;
		l->parameter_bytes = zp__quantise_parameter_bytes(&how);
		l->code_bits = zp__quantise_code_bits(&how);
		l->frame_elements -= l->frame_elements % l->block_elements;
		if (l->frame_elements == 0)
			l->frame_elements = l->block_elements;
	}
	l->wire_stride = p->lanes && !l->reduces ? 1 : frame_length(l, ZP__REDUCE_SCATTER, l->frame_elements);
	l->long_slots = (l->chunk_elements + 1 + l->frame_elements - 1) / l->frame_elements;
	l->short_slots = (l->chunk_elements + l->frame_elements - 1) / l->frame_elements;
	l->slot_count = l->long_chunks * l->long_slots + (l->chunks - l->long_chunks) * l->short_slots;
	int rc = p->lanes ? lanes_cut(p, l) : 0;
	if (rc == 0 && p->lanes)
		l->slot_count = l->cuts[l->chunks].first_slot;
	if (l->slot_count > ZP__SLOTS_MAX || need.elements / l->frame_elements > 2 * ZP__SLOTS_MAX)
		rc = -EINVAL;
	return need.buffers * l->wire_stride > ZP__TREES_WINDOW_BYTES ? -EINVAL : rc;
}

static void attempt_free(zp__attempt *attempt)
{
	zp__region_give(attempt->engine, &attempt->workspace);
	zp__region_give(attempt->engine, &attempt->wire);
	zp__region_give(attempt->engine, &attempt->shares);
	free(attempt->neighbours);
	free(attempt->layout.cuts);
	free(attempt->trees);
	free(attempt->copies);
	free(attempt->slots);
	free(attempt->owners);
	free(attempt->told);
	free(attempt);
}

/* Lists the neighbours, without their links. */
static int neighbours_list(zp__attempt *attempt)
{
	const zp_reduce_plan *plan = &attempt->plan;
	uint32_t n = plan->world_size, of_ring[] = {(plan->rank + 1) % n, (plan->rank + n - 1) % n};
	bool ring = plan->algorithm == ZP_RING;
	attempt->neighbours = calloc(ring ? 2 : n - 1, sizeof *attempt->neighbours);
	if (!attempt->neighbours)
		return -ENOMEM;
	for (uint32_t i = 0; i < (ring ? 2 : n); i++)
		if (ring || (i != plan->rank && zp__lanes_connect(plan, plan->rank, i)))
			attempt->neighbours[attempt->neighbour_count++].rank = ring ? of_ring[i] : i;
	return 0;
}

static int attempt_allocate(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	int rc = neighbours_list(attempt);
	if (rc < 0)
		return rc;
	attempt->slots = calloc(l->slot_count, sizeof *attempt->slots);
	if (!attempt->slots)
		return -ENOMEM;
	for (uint64_t i = 0; i < l->slot_count; i++)
		zp__list_init(&attempt->slots[i].node);
	bool aside = attempt->mode == ZP__IN_PLACE_RESTORE;
	if (attempt->mode == ZP__SCATTER)
		aside = l->world_size > 2 && !l->sum_itemsize && !attempt->plan.lanes; /* Two peers forward nothing. */
	rc = zp__region_take(attempt->engine, aside ? attempt->plan.count * l->itemsize : 0, &attempt->workspace);
	return rc < 0 ? rc : attempt->algorithm->allocate(attempt);
}

static enum zp__mode mode_of(const zp_reduce_plan *plan)
{
	if (plan->kind == ZP_REDUCE_SCATTER)
		return ZP__SCATTER;
	if (plan->input != plan->output)
		return ZP__OUT_OF_PLACE;
	bool is_root = plan->kind == ZP_BROADCAST && plan->owners[0] == plan->rank; /* The root only reads. */
	return plan->restore && !is_root ? ZP__IN_PLACE_RESTORE : ZP__IN_PLACE;
}

static int owners_copy(zp__attempt *attempt)
{
	const zp_reduce_plan *plan = &attempt->plan;
	if (!plan->owners)
		return 0;
	size_t bytes = (plan->kind == ZP_BROADCAST ? 1 : plan->world_size) * sizeof *attempt->owners;
	attempt->owners = malloc(bytes);
	if (!attempt->owners)
		return -ENOMEM;
	memcpy(attempt->owners, plan->owners, bytes);
	attempt->layout.owners = attempt->plan.owners = attempt->owners;
	return 0;
}

static int peers_copy(zp__attempt *attempt, const zp_reduce_plan *plan)
{
	if (!plan->digest_channel)
		return 0;
	size_t bytes = (size_t)plan->world_size * ZP_PEER_ID_BYTES;
	attempt->told = malloc(bytes);
	if (!attempt->told)
		return -ENOMEM;
	memcpy(attempt->told, plan->peers, bytes);
	return 0;
}

static int attempt_new(zp_engine *engine, const zp_reduce_plan *plan, zp__attempt **result)
{
	int rc = plan_check(plan);
	if (rc < 0)
		return rc;
	zp__attempt *attempt = calloc(1, sizeof *attempt);
	if (!attempt)
		return -ENOMEM;
	attempt->engine = engine;
	attempt->algorithm = plan->kind == ZP_ALL_TO_ALL  ? &zp__exchange
			     : plan->algorithm == ZP_ONE_SHOT ? &zp__one_shot
			     : plan->algorithm == ZP_DIRECT   ? &zp__trees
							      : &zp__ring;
	attempt->plan = *plan;
	attempt->plan.peers = NULL;
	attempt->quantised = plan->quantization != ZP_QUANTIZE_NONE;
	attempt->mode = mode_of(plan);
	zp__list_init(&attempt->node);
	zp__list_init(&attempt->event.node);
	rc = layout_make(plan, &attempt->layout);
	if (rc == 0)
		rc = owners_copy(attempt);
	if (rc == 0)
		rc = peers_copy(attempt, plan);
	if (rc == 0)
		rc = attempt_allocate(attempt);
	attempt->plan.lanes = NULL;
	if (rc < 0)
		attempt_free(attempt);
	else
		*result = attempt;
	return rc;
}

/* Lock held. Finds the links that the attempt needs. */
static int attempt_link(zp_engine *engine, zp__attempt *attempt, const zp_reduce_plan *plan)
{
	for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
		zp__neighbour *neighbour = &attempt->neighbours[i];
		neighbour->link = zp__link_find(engine, plan->peers + (size_t)neighbour->rank * ZP_PEER_ID_BYTES);
		if (!neighbour->link)
			return -ENOTCONN;
	}
	if (plan->algorithm == ZP_RING) {
		attempt->next = attempt->neighbours[0].link;
		attempt->previous = attempt->neighbours[1].link;
		attempt->flow = &attempt->neighbours[0].flow;
	}
	for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
		zp__neighbour *neighbour = &attempt->neighbours[i];
		neighbour->link->references++;
		zp__flow_open(&neighbour->flow, neighbour->link, attempt);
	}
	return 0;
}

/* Bytes and frames that the links of an attempt have moved, for any attempt. */
static void links_moved(const zp__attempt *attempt, uint64_t *bytes, uint64_t *frames)
{
	*bytes = *frames = 0;
	for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
		*bytes += attempt->neighbours[i].link->moved_bytes;
		*frames += attempt->neighbours[i].link->moved_frames;
	}
}

/* Announces that the attempt has begun, to the peers that send us frames of it. */
static void started_announce(zp__attempt *attempt)
{
	uint32_t first = attempt->previous ? 1 : 0; /* In a ring only `previous` sends to us. */
	for (uint32_t i = first; !zp__is_eager(attempt) && i < attempt->neighbour_count; i++)
		zp__started_offer(attempt->neighbours[i].link, &attempt->neighbours[i].flow);
}

int zp_reduce_start(zp_engine *engine, const zp_reduce_plan *plan)
{
	zp__attempt *attempt = NULL;
	int rc = attempt_new(engine, plan, &attempt);
	pthread_mutex_lock(&engine->mutex);
	if (rc == 0) {
		if (engine->stopping)
			rc = -ESHUTDOWN;
		else if (zp__attempt_find(engine, plan->attempt))
			rc = -EEXIST;
		else
			rc = attempt_link(engine, attempt, plan);
	}
	if (rc == 0) {
		attempt->due_ns = zp__now_ns() + zp__stall_timeout_ns(engine);
		links_moved(attempt, &attempt->seen_link_bytes, &attempt->seen_link_frames);
		zp__list_append(&engine->attempts[plan->attempt % ZP__ATTEMPT_BUCKETS], &attempt->node);
		started_announce(attempt); /* First: the connection that it wakes also takes a frame of the attempt. */
		attempt->algorithm->start(attempt);
		zp__thread_wake(&engine->threads[0]); /* It checks attempts for stalls. */
	}
	if (rc != -EINVAL)
		zp__attempt_learn(engine, plan->attempt);
	bool early = rc == 0 && zp__early_is_kept(engine, plan->attempt);
	pthread_mutex_unlock(&engine->mutex);
	if (early)
		zp__early_replay(engine, plan->attempt);
	if (rc < 0 && attempt)
		attempt_free(attempt);
	return rc;
}

void zp__attempt_unpin(zp_engine *engine, zp__attempt *attempt)
{
	if (--attempt->pins == 0 && attempt->ending)
		pthread_cond_broadcast(&engine->unpinned);
}

static void report(zp__attempt *attempt, int status, const uint8_t *fault)
{
	zp_event *event = &attempt->event.event;
	*event = (zp_event){.kind = ZP_EVENT_REDUCE_DONE,
			    .status = status,
			    .id = attempt->plan.attempt,
			    .digest = attempt->digest,
			    .tx_bytes = attempt->tx_bytes,
			    .rx_bytes = attempt->rx_bytes,
			    .told = status == 0 && attempt->told};
	if (fault)
		memcpy(event->peer, fault, ZP_PEER_ID_BYTES);
	zp__event_push(&attempt->engine->queue, &attempt->event);
}

/* Finds the attempt of a frame, whose id is known, and where its body goes. */
enum zp__verdict zp__attempt_admit(zp__receive *rx)
{
	zp__attempt *attempt = zp__attempt_find(rx->link->engine, rx->frame.id);
	if (!attempt || attempt->status < 0 || attempt->ending)
		return ZP__DROP;
	enum zp__verdict verdict = attempt->algorithm->admit(attempt, rx);
	if (verdict == ZP__ADMIT) {
		rx->attempt = attempt;
		attempt->pins++;
	}
	return verdict;
}

static void flows_retract(zp__attempt *attempt)
{
	for (uint32_t i = 0; i < attempt->neighbour_count; i++)
		zp__link_retract(&attempt->neighbours[i].flow);
}

/* Sends the digest to the other peers. No peer relies on this message, so it is left out if there is no link. */
static void digest_tell(const zp__attempt *attempt)
{
	const zp_reduce_plan *plan = &attempt->plan;
	uint64_t body[] = {__builtin_bswap64(plan->attempt), __builtin_bswap64(plan->call),
			   __builtin_bswap64(attempt->digest)};
	for (uint32_t rank = 0; attempt->told && rank < plan->world_size; rank++)
		if (rank != plan->rank)
			zp__message_send(attempt->engine, attempt->told + (size_t)rank * ZP_PEER_ID_BYTES,
					 plan->digest_channel, body, sizeof body);
}

/* Reports REDUCE_DONE once all frames are sent and received. */
void zp__attempt_progress(zp__attempt *attempt)
{
	if (attempt->rx_remaining || attempt->tx_remaining || attempt->done || attempt->status < 0 || attempt->ending)
		return;
	attempt->done = true;
	digest_tell(attempt);
	report(attempt, 0, NULL);
}

/* `fault` may be NULL: no peer is known to be at fault. */
void zp__attempt_fail(zp__attempt *attempt, int status, const uint8_t *fault)
{
	if (attempt->done || attempt->status < 0 || attempt->ending)
		return;
	attempt->status = status;
	flows_retract(attempt);
	report(attempt, status, fault);
}

void zp__attempts_fail(zp__link *link, int status)
{
	zp_engine *engine = link->engine;
	for (uint32_t i = 0; i < ZP__ATTEMPT_BUCKETS; i++) {
		ZP__EACH(node, &engine->attempts[i])
		{
			zp__attempt *attempt = ZP__ELEMENT(node, zp__attempt, node);
			for (uint32_t k = 0; k < attempt->neighbour_count; k++)
				if (attempt->neighbours[k].link == link)
					zp__attempt_fail(attempt, status, link->peer);
		}
	}
}

static bool takes_nothing(const zp__attempt *attempt, const zp__neighbour *neighbour)
{
	if (!zp__list_empty(&neighbour->flow.frames))
		return true;
	for (uint32_t i = 0; i < neighbour->link->connection_count; i++) {
		const zp__connection *c = &neighbour->link->connections[i];
		if ((c->tx.active && c->tx.attempt == attempt) || (c->fd >= 0 && zp__sock_has_unsent(c->fd)) ||
		    (c->retransmit.closed && !zp__list_empty(&neighbour->flow.sent[i])))
			return true;
	}
	return false;
}

static bool stopped_in_a_frame(const zp__attempt *attempt, const zp__neighbour *neighbour)
{
	for (uint32_t i = 0; i < neighbour->link->connection_count; i++) {
		const zp__receive *rx = &neighbour->link->connections[i].rx;
		bool is_early = rx->message && rx->frame.kind != ZP__MESSAGE;
		if (rx->attempt == attempt || (is_early && rx->frame.id == attempt->plan.attempt))
			return true;
	}
	return false;
}

/* The peer that probably blocks a stalled attempt: one that does not receive what we send; if there is none, one that
 * stopped in the middle of a frame; otherwise NULL (unknown).
 *
 * The link to it stays open. If its path were broken, zp__links_check() would have lost the link by now. So the peer is
 * reachable but stopped, or waits for others, or does not know the attempt yet. A new link would not change that, and
 * closing this one would fail the other attempts that use it. */
static const uint8_t *stall_fault(const zp__attempt *attempt)
{
	uint32_t receivers = attempt->next ? 1 : attempt->neighbour_count; /* A ring sends to `next` alone. */
	for (uint32_t i = 0; i < receivers; i++)
		if (takes_nothing(attempt, &attempt->neighbours[i]))
			return attempt->neighbours[i].link->peer;
	for (uint32_t i = 0; i < attempt->neighbour_count; i++)
		if (stopped_in_a_frame(attempt, &attempt->neighbours[i]))
			return attempt->neighbours[i].link->peer;
	return NULL;
}

/* A frame was sent or received completely on this link. `attempt`: its attempt; NULL: that has ended. */
void zp__attempt_moved(zp__attempt *attempt, zp__link *link)
{
	link->moved_frames++;
	link->moved_ns = zp__now_ns();
	if (attempt)
		attempt->moved_ns = link->moved_ns;
}

/* An attempt has stalled when no frame of it was completed for a stall_timeout. Bytes of incomplete frames give it more
 * time, at RATE_MIN. Attempts take turns on a link, so frames and bytes of other attempts count, too, but only for one
 * turn: otherwise an attempt that a peer ignores would not stall while the others go on. */
static void due_renew(zp__attempt *attempt, uint64_t now_ns)
{
	uint64_t stall_ns = zp__stall_timeout_ns(attempt->engine), moved_ns = attempt->moved_ns, link_bytes, link_frames;
	uint64_t bytes = attempt->tx_bytes + attempt->rx_bytes, frames = attempt->tx_remaining + attempt->rx_remaining;
	links_moved(attempt, &link_bytes, &link_frames);
	uint64_t moved = bytes - attempt->seen_bytes;
	if (frames != attempt->seen_frames)
		attempt->seen_link_frames = link_frames;
	if (link_frames - attempt->seen_link_frames <= ZP__TURN_FRAMES) {
		moved = link_bytes - attempt->seen_link_bytes;
		for (uint32_t i = 0; i < attempt->neighbour_count; i++)
			if (attempt->neighbours[i].link->moved_ns > moved_ns)
				moved_ns = attempt->neighbours[i].link->moved_ns;
	}
	attempt->seen_bytes = bytes;
	attempt->seen_link_bytes = link_bytes;
	attempt->seen_frames = frames;
	uint64_t due_ns = attempt->due_ns + moved * (1000000000u / ZP__RATE_MIN), latest_ns = now_ns + stall_ns;
	due_ns = due_ns < latest_ns ? due_ns : latest_ns;
	attempt->due_ns = due_ns > moved_ns + stall_ns ? due_ns : moved_ns + stall_ns;
}

uint64_t zp__attempts_check(zp_engine *engine, uint64_t now_ns)
{
	uint64_t next_ns = UINT64_MAX;
	for (uint32_t i = 0; i < ZP__ATTEMPT_BUCKETS; i++) {
		ZP__EACH(node, &engine->attempts[i])
		{
			zp__attempt *attempt = ZP__ELEMENT(node, zp__attempt, node);
			if (attempt->done || attempt->status < 0 || attempt->ending)
				continue;
			if (engine->stalls_held)
				attempt->due_ns = now_ns + zp__stall_timeout_ns(engine);
			else if (attempt->due_ns <= now_ns)
				due_renew(attempt, now_ns);
			if (attempt->due_ns <= now_ns)
				zp__attempt_fail(attempt, -ETIMEDOUT, stall_fault(attempt));
			else if (attempt->due_ns < next_ns)
				next_ns = attempt->due_ns;
		}
	}
	return next_ns;
}

/* Makes `c` finish its current frame from a copy of the body, or drops the frame if no byte of it was sent. */
static void transmit_detach(zp__connection *c)
{
	zp__transmit *tx = &c->tx;
	if (tx->sent == 0) {
		*tx = (zp__transmit){0};
		zp__connection_attend(c);
		return;
	}
	tx->attempt = NULL;
	tx->slot = NULL;
	tx->flow = NULL;
	uint64_t done = tx->sent > ZP__HEADER_BYTES ? tx->sent - ZP__HEADER_BYTES : 0;
	tx->aside = malloc(tx->length);
	if (!tx->aside) {
		tx->active = false;
		tx->body = NULL;
		zp__connection_lose(c, -ENOMEM);
		return;
	}
	memcpy(tx->aside + done, tx->body + done, tx->length - done);
	tx->body = tx->aside;
}

static void connection_detach(zp__connection *c, const zp__attempt *attempt)
{
	if (c->tx.active && c->tx.attempt == attempt)
		transmit_detach(c);
	if (c->rx.attempt != attempt)
		return;
	c->rx.attempt = NULL; /* body_step() drops the rest of the frame. */
	c->rx.slot = NULL;
}

/* Lock held, no pins. Removes every reference of a connection to the attempt. */
static void attempt_detach(zp__attempt *attempt)
{
	for (uint32_t k = 0; k < attempt->neighbour_count; k++) {
		zp__link *link = attempt->neighbours[k].link;
		for (uint32_t i = 0; i < link->connection_count; i++)
			connection_detach(&link->connections[i], attempt);
	}
}

/* Restores the old bytes of an in-place buffer. No other thread uses the attempt any more. */
static void attempt_restore(zp__attempt *attempt)
{
	const zp__layout *l = &attempt->layout;
	for (uint64_t i = 0; attempt->mode == ZP__IN_PLACE_RESTORE && i < l->slot_count; i++) {
		if (!(attempt->slots[i].flags & ZP__SLOT_SAVED))
			continue;
		zp__span span = zp__slot_span(l, i);
		memcpy(output_at(attempt, &span), workspace_at(attempt, &span), span.elements * l->itemsize);
	}
}

/* Lock held at entry and at return; released in between. */
static void attempt_end(zp_engine *engine, zp__attempt *attempt, bool restore)
{
	attempt->ending = true;
	flows_retract(attempt);
	zp__event_withdraw(engine, &attempt->event);
	while (attempt->pins)
		pthread_cond_wait(&engine->unpinned, &engine->mutex);
	attempt_detach(attempt);
	pthread_mutex_unlock(&engine->mutex);

	if (restore)
		attempt_restore(attempt);

	pthread_mutex_lock(&engine->mutex);
	for (uint32_t i = 0; i < attempt->neighbour_count; i++)
		zp__flow_close(attempt->neighbours[i].link, &attempt->neighbours[i].flow);
	zp__list_remove(&attempt->node);
	for (uint32_t i = 0; i < attempt->neighbour_count; i++)
		zp__link_release(attempt->neighbours[i].link);
	pthread_cond_broadcast(&engine->unpinned);
}

int zp_reduce_end(zp_engine *engine, uint64_t id, int commit)
{
	pthread_mutex_lock(&engine->mutex);
	zp__attempt *attempt = zp__attempt_find(engine, id);
	int rc = 0;
	if (commit && (!attempt || !attempt->done || attempt->ending)) {
		rc = -EINVAL;
		attempt = NULL;
	}
	while (attempt && attempt->ending) { /* Another thread ends it. */
		pthread_cond_wait(&engine->unpinned, &engine->mutex);
		attempt = zp__attempt_find(engine, id);
	}
	if (attempt) {
		attempt_end(engine, attempt, !commit);
		pthread_mutex_unlock(&engine->mutex);
		attempt_free(attempt);
		pthread_mutex_lock(&engine->mutex);
	}
	if (rc == 0)
		zp__attempt_learn(engine, id);
	pthread_mutex_unlock(&engine->mutex);
	return rc;
}

int zp_reduce_withhold(zp_engine *engine, uint64_t id)
{
	pthread_mutex_lock(&engine->mutex);
	zp__attempt *attempt = zp__attempt_find(engine, id);
	int waits = attempt && attempt->event.event.told && !zp__list_empty(&attempt->event.node);
	if (attempt) {
		free(attempt->told);
		attempt->told = NULL;
	}
	pthread_mutex_unlock(&engine->mutex);
	return waits;
}

void zp_stalls_hold(zp_engine *engine, int hold)
{
	pthread_mutex_lock(&engine->mutex);
	zp__attempts_check(engine, zp__now_ns()); /* Applies the old setting until now. */
	engine->stalls_held = hold;
	pthread_mutex_unlock(&engine->mutex);
}

void zp__attempts_discard(zp_engine *engine)
{
	pthread_mutex_lock(&engine->mutex);
	for (uint32_t i = 0; i < ZP__ATTEMPT_BUCKETS; i++) {
		while (!zp__list_empty(&engine->attempts[i])) {
			zp__attempt *attempt = ZP__ELEMENT(engine->attempts[i].next, zp__attempt, node);
			if (attempt->ending) { /* Another thread ends it. */
				pthread_cond_wait(&engine->unpinned, &engine->mutex);
				continue;
			}
			attempt_end(engine, attempt, true);
			pthread_mutex_unlock(&engine->mutex);
			attempt_free(attempt);
			pthread_mutex_lock(&engine->mutex);
		}
	}
	pthread_mutex_unlock(&engine->mutex);
}
