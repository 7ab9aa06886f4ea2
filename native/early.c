/* Frames that come before the receiver has begun their attempt, because its plan arrives later. They are kept, so that
 * frames of other attempts behind them go on, and what is kept has a bound, so the sender does not send more.
 *
 * The receiver announces with a BEGUN frame the greatest id that it knows (ids are learnt in ascending order, zp_api.h):
 * of attempts up to it, it has begun all that it will begin. An attempt of a small tensor, ZP__EAGER_TENSOR_BYTES, is
 * sent without waiting for that and is not announced, which saves the frame. Of all others together a link sends up to
 * ZP__EAGER_BYTES before it is known that they have begun, about what a long path holds until the announcement comes;
 * then their flows wait, and those of other attempts do not. A message waits until its channel is announced.
 *
 * A frame that comes early is received like a message and charged like one (message.c). At the bound of messages its
 * connection parks, which only a peer that sends more than it should or very many small attempts can bring about. Kept
 * frames go through the functions of their algorithm once the attempt has started. Those of an attempt that never starts
 * are dropped when a greater id is learnt or their link is lost.
 *
 * An announcement is not acknowledged: when a connection of the link is lost, the latest is sent again.
 *
 * Everything here expects the lock held, but zp__early_replay(). */
#include <errno.h>
#include <string.h>

#include "attempt.h"
#include "early.h"
#include "engine.h"
#include "message.h"

bool zp__is_eager(const zp__attempt *attempt)
{
	const zp_reduce_plan *plan = &attempt->plan;
	uint64_t rows = plan->kind == ZP_ALL_GATHER ? plan->world_size : 1;
	return plan->count * attempt->layout.itemsize <= ZP__EAGER_TENSOR_BYTES / rows;
}

static bool is_begun(const zp__link *link, uint64_t id)
{
	return id <= link->begun_id || id >= ZP_FREE_CHANNEL;
}

/* The first frame of a flow that may be sent. NULL: none. Messages to one channel do not wait for those to another. */
static zp__list *frame_of(const zp__link *link, const zp__flow *flow)
{
	const zp__attempt *attempt = flow->attempt;
	if (attempt) {
		bool may = is_begun(link, attempt->plan.attempt) || zp__is_eager(attempt) ||
			   link->eager_bytes < ZP__EAGER_BYTES;
		return may ? flow->frames.next : NULL;
	}
	ZP__EACH(node, &flow->frames)
	{
		if (is_begun(link, ZP__ELEMENT(node, zp__message_out, node)->channel))
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
		if (attempt && !is_begun(link, attempt->plan.attempt) && !zp__is_eager(attempt)) {
			flow->eager_bytes += attempt->layout.wire_stride;
			link->eager_bytes += attempt->layout.wire_stride;
		}
		*result = flow;
		return frame;
	}
	link->withholds = !zp__list_empty(&link->flows);
	return NULL;
}

/* Lets the connections look again for frames, of which more may be sent now. */
static void look_again(zp__link *link)
{
	if (!link->withholds || !link->open)
		return;
	link->withholds = false;
	for (uint32_t i = 0; i < link->connection_count; i++)
		zp__connection_attend(&link->connections[i]);
}

static void credit_return(zp__link *link, zp__flow *flow)
{
	link->eager_bytes -= flow->eager_bytes;
	flow->eager_bytes = 0;
}

void zp__eager_release(zp__link *link, zp__flow *flow)
{
	credit_return(link, flow);
	look_again(link);
}

void zp__begun_offer(zp__link *link)
{
	link->announces = true;
	if (link->begun_queued)
		return;
	link->begun_queued = true;
	zp__link_wake_any(link);
}

/* Puts an announcement into c->tx. False: there is none to send. */
bool zp__begun_take(zp__connection *c)
{
	if (!c->link->begun_queued)
		return false;
	c->link->begun_queued = false;
	zp__frame frame = {.kind = ZP__BEGUN, .id = c->link->engine->id_known_max};
	c->tx = (zp__transmit){.active = true};
	zp__frame_encode(c->tx.header, &frame);
	return true;
}

/* The frame in c->rx is a BEGUN. */
enum zp__verdict zp__begun_admit(zp__connection *c)
{
	const zp__frame *frame = &c->rx.frame;
	zp__link *link = c->link;
	if (frame->lane || frame->chunk || frame->offset || frame->length || frame->id >= ZP_FREE_CHANNEL)
		return ZP__VIOLATION;
	if (frame->id <= link->begun_id) /* A later announcement has overtaken it. */
		return ZP__DROP;
	link->begun_id = frame->id;
	ZP__EACH(node, &link->open_flows)
	{
		zp__flow *flow = ZP__ELEMENT(node, zp__flow, open_node);
		if (flow->attempt && is_begun(link, flow->attempt->plan.attempt))
			credit_return(link, flow);
	}
	look_again(link);
	return ZP__DROP;
}

static void early_forget(zp_engine *engine, zp__message_in *early)
{
	zp__list_remove(&early->event.node);
	zp__message_forget(engine, early);
}

void zp__early_drop(zp_engine *engine, const zp__link *link)
{
	ZP__EACH(node, &engine->early)
	{
		zp__message_in *early = ZP__ELEMENT(node, zp__message_in, event.node);
		uint64_t id = early->frame.id;
		if (early->link == link || (zp__id_is_known(engine, id) && !zp__attempt_find(engine, id)))
			early_forget(engine, early);
	}
}

static zp__message_in *early_find(zp_engine *engine, uint64_t id)
{
	ZP__EACH(node, &engine->early)
	{
		zp__message_in *early = ZP__ELEMENT(node, zp__message_in, event.node);
		if (early->frame.id == id)
			return early;
	}
	return NULL;
}

/* Takes the next frame that was kept for an id and may be admitted, to `rx`; pins its attempt. NULL: there is none. */
static zp__message_in *early_admit(zp_engine *engine, uint64_t id, zp__receive *rx)
{
	zp__message_in *early;
	while (zp__id_is_known(engine, id) && (early = early_find(engine, id))) {
		*rx = (zp__receive){.link = early->link, .frame = early->frame, .checksum = early->checksum};
		enum zp__verdict verdict = zp__attempt_admit(rx);
		if (verdict == ZP__ADMIT) {
			zp__list_remove(&early->event.node);
			rx->attempt->rx_bytes += ZP__HEADER_BYTES + early->bytes;
			early->link->moved_bytes += early->bytes;
			return early;
		}
		if (verdict == ZP__DROP)
			early_forget(engine, early);
		else /* An honest peer sends nothing early that would have to wait. */
			zp__link_lose(early->link, -EPROTO, true);
	}
	return NULL;
}

void zp__early_replay(zp_engine *engine, uint64_t id)
{
	zp__receive rx;
	zp__message_in *early;
	pthread_mutex_lock(&engine->mutex);
	while ((early = early_admit(engine, id, &rx))) {
		zp__attempt *attempt = rx.attempt;
		pthread_mutex_unlock(&engine->mutex);
		if (!rx.body)
			rx.body = early->body;
		attempt->algorithm->make_room(&rx); /* It cannot fail: there is a body. */
		if (rx.body != early->body)
			memcpy(rx.body, early->body, rx.frame.length);
		attempt->algorithm->landed(&rx);
		pthread_mutex_lock(&engine->mutex);
		zp__attempt_moved(attempt, early->link);
		zp__attempt_unpin(engine, attempt);
		zp__message_forget(engine, early);
	}
	pthread_mutex_unlock(&engine->mutex);
}
