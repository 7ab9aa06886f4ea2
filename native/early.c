/* Frames that come before the receiver has begun their attempt, because its plan arrives later. They are kept, so that
 * they do not block frames of other attempts behind them. Their memory is bounded, so the sender limits what it sends
 * early.
 *
 * An end that has begun an attempt announces it with a STARTED frame. A small tensor, of up to ZP__EAGER_TENSOR_BYTES,
 * is sent without waiting for that, and its attempt is not announced, which saves a frame. For all larger tensors
 * together a link sends up to ZP__EAGER_BYTES before the other end has announced them: about as much as a long path
 * holds until the announcement comes. With many links it sends less, since the other end keeps only an equal share for
 * each of its links (message.c), of which half is left for small tensors, announcements and messages. After that, flows
 * of attempts that are not announced wait, and other flows do not. A message waits until its channel is announced: an
 * OPENED frame names the greatest channel, since channels are opened in ascending order (zp_api.h).
 *
 * An early frame is received like a message and charged like one (message.c). At the bound of messages its connection
 * parks; only a peer that sends too much, or very many small attempts, can cause that. Kept frames go through the
 * functions of their algorithm once the attempt has started. Frames of an attempt that never starts are dropped when
 * the caller ends it, after ZP__ID_WINDOW greater ids, or when their link is lost.
 *
 * An announcement is not acknowledged: when a connection of the link is lost, it is sent again.
 *
 * Everything here except zp__early_replay() expects the lock held. */
#include <errno.h>
#include <fenv.h>
#include <string.h>

#include "attempt.h"
#include "early.h"
#include "engine.h"
#include "message.h"
#include "pace.h"

bool zp__is_eager(const zp__attempt *attempt)
{
	const zp_reduce_plan *plan = &attempt->plan;
	uint64_t rows = plan->kind == ZP_ALL_GATHER ? plan->world_size : 1;
	return plan->count * attempt->layout.itemsize <= ZP__EAGER_TENSOR_BYTES / rows;
}

static bool is_open(const zp__link *link, uint64_t channel)
{
	return channel <= link->channel_max || channel >= ZP_FREE_CHANNEL;
}

/* True if one more frame may be sent that may be early. The other end is taken to have as many links as this one. */
static bool may_be_early(const zp__link *link, const zp__attempt *attempt)
{
	const zp_engine *engine = link->engine;
	uint64_t half_share = engine->config.messages_queued_bytes_max / engine->link_count / 2;
	uint64_t with_it = link->eager_bytes + zp__early_charge(attempt->layout.wire_stride);
	return !link->eager_bytes || (link->eager_bytes < ZP__EAGER_BYTES && with_it <= half_share);
}

/* The first frame of a flow that may be sent. NULL: none. Messages to different channels do not wait for each other. */
static zp__list *frame_of(zp__link *link, const zp__flow *flow)
{
	const zp__attempt *attempt = flow->attempt;
	if (attempt) {
		if (zp__pace_holds(link, flow))
			return NULL;
		bool may = flow->begun || zp__is_eager(attempt) || may_be_early(link, attempt);
		return may ? flow->frames.next : NULL;
	}
	ZP__EACH(node, &flow->frames)
	{
		if (is_open(link, ZP__ELEMENT(node, zp__message_out, node)->channel))
			return node;
	}
	return NULL;
}

zp__list *zp__frame_next(zp__link *link, zp__flow **result)
{
	ZP__EACH(node, &link->flows)
	{
		zp__flow *flow = ZP__ELEMENT(node, zp__flow, node);
		const zp__attempt *attempt = flow->attempt;
		zp__list *frame = frame_of(link, flow);
		if (!frame)
			continue;
		if (attempt && !flow->begun && !zp__is_eager(attempt)) {
			uint64_t charge = zp__early_charge(attempt->layout.wire_stride);
			flow->eager_bytes += charge;
			link->eager_bytes += charge;
		}
		flow->due_ns += flow->step_ns;
		*result = flow;
		return frame;
	}
	link->withholds = !zp__list_empty(&link->flows);
	return NULL;
}

static void credit_return(zp__link *link, zp__flow *flow)
{
	link->eager_bytes -= flow->eager_bytes;
	flow->eager_bytes = 0;
}

void zp__eager_release(zp__link *link, zp__flow *flow)
{
	credit_return(link, flow);
	zp__link_look_again(link);
}

void zp__opened_offer(zp__link *link)
{
	if (link->opened_queued)
		return;
	link->opened_queued = true;
	zp__link_wake_any(link);
}

void zp__started_offer(zp__link *link, zp__flow *flow)
{
	flow->announces = true;
	zp__list_remove(&flow->started_node);
	zp__list_append(&link->started, &flow->started_node);
	zp__link_wake_any(link);
}

void zp__announce_again(zp__link *link)
{
	if (link->engine->channel_max)
		zp__opened_offer(link);
	ZP__EACH(node, &link->open_flows)
	{
		zp__flow *flow = ZP__ELEMENT(node, zp__flow, open_node);
		if (flow->announces)
			zp__started_offer(link, flow);
	}
}

/* Puts an announcement into c->tx. False: there is none to send. */
bool zp__announcement_take(zp__connection *c)
{
	zp__link *link = c->link;
	zp__frame frame;
	if (link->opened_queued) {
		link->opened_queued = false;
		frame = (zp__frame){.kind = ZP__OPENED, .id = link->engine->channel_max};
	} else if (!zp__list_empty(&link->started)) {
		zp__flow *flow = ZP__ELEMENT(link->started.next, zp__flow, started_node);
		zp__list_remove(&flow->started_node);
		frame = (zp__frame){.kind = ZP__STARTED, .id = flow->attempt->plan.attempt};
	} else {
		return false;
	}
	c->tx = (zp__transmit){.active = true};
	zp__frame_encode(c->tx.header, &frame);
	return true;
}

static bool is_announcement(const zp__frame *frame)
{
	return !frame->chunk && !frame->offset && !frame->length && frame->id < ZP_FREE_CHANNEL;
}

enum zp__verdict zp__opened_admit(zp__connection *c)
{
	const zp__frame *frame = &c->rx.frame;
	zp__link *link = c->link;
	if (!is_announcement(frame))
		return ZP__VIOLATION;
	if (frame->id <= link->channel_max) /* A later announcement has overtaken it. */
		return ZP__DROP;
	link->channel_max = frame->id;
	zp__link_look_again(link);
	return ZP__DROP;
}

/* The other end of a link has begun an attempt that runs here. */
static void started_note(zp__attempt *attempt, zp__link *link)
{
	for (uint32_t i = 0; i < attempt->neighbour_count; i++) {
		if (attempt->neighbours[i].link != link)
			continue;
		attempt->neighbours[i].flow.begun = true;
		zp__pace_restart(&attempt->neighbours[i].flow);
		credit_return(link, &attempt->neighbours[i].flow);
	}
	zp__link_look_again(link);
}

enum zp__verdict zp__started_admit(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	const zp__frame *frame = &c->rx.frame;
	if (!is_announcement(frame))
		return ZP__VIOLATION;
	if (!zp__attempt_is_known(engine, frame->id))
		return zp__early_admit(c); /* It is kept like other frames of the attempt. */
	zp__attempt *attempt = zp__attempt_find(engine, frame->id);
	if (attempt)
		started_note(attempt, c->link);
	return ZP__DROP;
}

static void early_forget(zp_engine *engine, zp__message_in *early)
{
	zp__list_remove(&early->event.node);
	zp__message_forget(engine, early);
}

static zp__list *bucket_of(zp_engine *engine, uint64_t id)
{
	return &engine->early[id % ZP__EARLY_BUCKETS];
}

void zp__early_keep(zp__message_in *early)
{
	zp__list_append(bucket_of(early->link->engine, early->frame.id), &early->event.node);
}

void zp__early_drop(const zp__link *link)
{
	for (uint32_t i = 0; i < ZP__EARLY_BUCKETS; i++) {
		ZP__EACH(node, &link->engine->early[i])
		{
			zp__message_in *early = ZP__ELEMENT(node, zp__message_in, event.node);
			if (early->link == link)
				early_forget(link->engine, early);
		}
	}
}

static void bucket_drop_ended(zp_engine *engine, zp__list *bucket)
{
	ZP__EACH(node, bucket)
	{
		zp__message_in *early = ZP__ELEMENT(node, zp__message_in, event.node);
		uint64_t id = early->frame.id;
		if (zp__attempt_is_known(engine, id) && !zp__attempt_find(engine, id))
			early_forget(engine, early);
	}
}

void zp__early_drop_ended(zp_engine *engine, uint64_t id, uint64_t before)
{
	_Static_assert(ZP__ID_WINDOW % ZP__EARLY_BUCKETS == 0, "ids that leave the window are in the buckets of new ones");
	uint64_t first = id > before ? before + 1 : id;
	if (id - first >= ZP__EARLY_BUCKETS)
		first = id - ZP__EARLY_BUCKETS + 1;
	for (uint64_t each = first; each <= id; each++)
		bucket_drop_ended(engine, bucket_of(engine, each));
}

static zp__message_in *early_find(zp_engine *engine, uint64_t id)
{
	ZP__EACH(node, bucket_of(engine, id))
	{
		zp__message_in *early = ZP__ELEMENT(node, zp__message_in, event.node);
		if (early->frame.id == id)
			return early;
	}
	return NULL;
}

bool zp__early_is_kept(zp_engine *engine, uint64_t id)
{
	return early_find(engine, id);
}

/* Puts the next kept frame of the attempt `id` that is admitted into `rx`, and pins its attempt. NULL: there is
 * none. */
static zp__message_in *early_admit(zp_engine *engine, uint64_t id, zp__receive *rx)
{
	zp__message_in *early;
	zp__attempt *attempt;
	while (zp__attempt_is_known(engine, id) && (early = early_find(engine, id))) {
		*rx = (zp__receive){.link = early->link, .frame = early->frame, .checksum = early->checksum};
		enum zp__verdict verdict = ZP__DROP;
		if (early->frame.kind != ZP__STARTED)
			verdict = zp__attempt_admit(rx);
		else if ((attempt = zp__attempt_find(engine, id)))
			started_note(attempt, early->link);
		if (verdict == ZP__ADMIT) {
			zp__list_remove(&early->event.node);
			rx->attempt->rx_bytes += ZP__HEADER_BYTES + early->bytes;
			early->link->moved_bytes += early->bytes;
			return early;
		}
		if (verdict == ZP__PARK) /* It came too early, but its sender may have passed it on in good faith (ring.c). */
			zp__attempt_fail(zp__attempt_find(engine, id), -EPROTO, NULL);
		if (verdict == ZP__VIOLATION)
			zp__link_lose(early->link, -EPROTO, true); /* That forgets the frame. */
		else
			early_forget(engine, early);
	}
	return NULL;
}

/* Handles a kept frame as if it had come now. All peers must compute the same bits, so it uses the default
 * floating-point environment and not the caller's. */
static void early_land(zp__receive *rx, uint8_t *body)
{
	fenv_t environment;
	fegetenv(&environment);
	fesetenv(FE_DFL_ENV);
	if (!rx->body)
		rx->body = body;
	rx->attempt->algorithm->make_room(rx); /* It cannot fail: there is a body. */
	if (rx->body != body)
		memcpy(rx->body, body, rx->frame.length);
	rx->attempt->algorithm->landed(rx);
	fesetenv(&environment);
}

void zp__early_replay(zp_engine *engine, uint64_t id)
{
	zp__receive rx;
	zp__message_in *early;
	pthread_mutex_lock(&engine->mutex);
	while ((early = early_admit(engine, id, &rx))) {
		zp__attempt *attempt = rx.attempt;
		pthread_mutex_unlock(&engine->mutex);
		early_land(&rx, early->body);
		pthread_mutex_lock(&engine->mutex);
		zp__attempt_moved(attempt, early->link);
		zp__attempt_unpin(engine, attempt);
		zp__message_forget(engine, early);
	}
	pthread_mutex_unlock(&engine->mutex);
}
