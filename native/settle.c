/* Settling: when one of several connections of a link is lost, both ends agree on which of its frames arrived, and the
 * rest goes over the others.
 *
 *        live ----- error, end of the stream, silence, or a SETTLE of the other end ----> closing
 *         ^                                                                                  | closed by its thread:
 *         | zp_link_add(), by then                                                           v SETTLE goes out
 *        free <---- the other end's SETTLE has come: its number of frames have arrived,  closed
 *                   what was sent beyond it is queued again
 *
 * Frames of one connection arrive in order, so their number says all. A SETTLE tells the final number, and is final
 * because the connection is closed where it is made. Nothing is sent again before the other end's SETTLE is here, and
 * by then the other end has forgotten the frame that it had a part of: nothing arrives twice. SETTLEs go over any live
 * connection. When that is lost too they are sent again at once, as two that are lost would wait for each other
 * otherwise; one that comes again is ignored.
 *
 * What was sent must be there to be sent again. For frames of an attempt this costs nothing: their bytes stay in place
 * until the attempt ends; only a reduce-scatter frame is overwritten before, by the all-gather frame of its place.
 * That frame has gone round the ring after ours, so it shows that ours has arrived (ring.c takes the slot off the list
 * of sent frames). Messages are kept until a CONFIRM tells how many frames of their connection came so far. CONFIRMs
 * are not sent again: what the last one told is told anew whenever a connection of the link is lost.
 *
 * Generations. A place in the link is taken again by zp_link_add(), first at the end that was dialled, and only when
 * the place is free there. So this end has got our SETTLE of the generation before, and at most one generation at a
 * time is known to one end only. It may be lost before the other end takes it, which then answers its SETTLE: none of
 * its frames came.
 *
 * A peer that lies about numbers only loses frames, or gets them twice, which its own end answers for. How often frames
 * are sent again is bounded (ZP__RESENDS_PER_SLOT_MAX). All here is under the lock. */
#include <errno.h>
#include <string.h>

#include "zp_internal.h"

static void control_init(zp__control *control, zp__connection *connection, uint8_t kind)
{
	control->connection = connection;
	control->kind = kind;
	zp__list_init(&control->node);
}

void zp__settle_init(zp__connection *c)
{
	zp__settling *s = &c->settling;
	control_init(&s->settle, c, ZP__SETTLE);
	control_init(&s->confirm, c, ZP__CONFIRM);
	zp__list_init(&s->carried);
	zp__list_init(&s->event.node);
}

/* Wherever it is, in the queue, being sent or sent: it is not to be sent again. */
static void control_forget(zp__control *control)
{
	zp__link *link = control->connection->link;
	zp__list_remove(&control->node);
	control->queued = false;
	for (uint32_t i = 0; control->kind == ZP__SETTLE && i < link->connection_count; i++)
		if (link->connections[i].tx.settles == control->connection)
			link->connections[i].tx.settles = NULL;
}

static void control_offer(zp__control *control)
{
	zp__link *link = control->connection->link;
	control->queued = true;
	zp__list_append(&link->control, &control->node);
	zp__link_wake_idle(link);
}

static void settle_offer(zp__connection *c, uint32_t generation, uint64_t frames)
{
	zp__control *settle = &c->settling.settle;
	control_forget(settle);
	settle->generation = generation;
	settle->frames = frames;
	control_offer(settle);
}

static void confirm_offer(zp__connection *c)
{
	if (c->fd >= 0 && !c->closing && !c->settling.confirm.queued)
		control_offer(&c->settling.confirm);
}

/* Makes the next SETTLE or CONFIRM of the link the frame to send. False: there is none. */
bool zp__settle_take(zp__connection *c)
{
	zp__link *link = c->link;
	if (zp__list_empty(&link->control))
		return false;
	zp__control *control = ZP__ELEMENT(link->control.next, zp__control, node);
	zp__connection *about = control->connection;
	bool settles = control->kind == ZP__SETTLE;
	zp__list_remove(&control->node);
	control->queued = false;
	zp__frame frame = {.kind = control->kind,
			   .chunk = about->index,
			   .id = settles ? control->generation : about->settling.generation,
			   .offset = settles ? control->frames : about->settling.rx_frames};
	c->tx = (zp__transmit){.active = true, .settles = settles ? about : NULL};
	zp__frame_encode(c->tx.header, &frame);
	return true;
}

static uint64_t *sequence_of(const zp__flow *flow, zp__list *frame)
{
	return flow->attempt ? &ZP__ELEMENT(frame, zp__slot, node)->sequence
			     : &ZP__ELEMENT(frame, zp__message_out, node)->sequence;
}

/* Keeps the frame in c->tx as the one of number `sequence` on its connection. */
static void keep(zp__connection *c, uint64_t sequence)
{
	zp__transmit *tx = &c->tx;
	if (tx->settles)
		zp__list_append(&c->settling.carried, &tx->settles->settling.settle.node);
	if (tx->flow) {
		zp__list *frame = tx->message ? &tx->message->node : &tx->slot->node;
		*sequence_of(tx->flow, frame) = sequence;
		zp__list_append(&tx->flow->sent[c->index], frame);
	}
}

/* The frame in c->tx has left. */
void zp__settle_sent(zp__connection *c)
{
	uint64_t sequence = ++c->settling.tx_frames;
	if (c->tx.message && (!c->link->open || sequence <= c->settling.confirmed))
		zp__message_sent(c->link, c->tx.message);
	else if (c->link->open)
		keep(c, sequence);
}

/* The frame in c->rx has come. */
void zp__settle_received(zp__connection *c)
{
	c->settling.rx_frames++;
	if (c->rx.frame.kind != ZP__MESSAGE || !c->link->open)
		return;
	c->settling.has_messages = true;
	confirm_offer(c);
}

/* The other end has got the first `frames` frames of `c`. */
static void confirm(zp__connection *c, uint64_t frames)
{
	zp__list *sent = &c->link->messages.sent[c->index];
	if (frames > c->settling.confirmed)
		c->settling.confirmed = frames;
	while (!zp__list_empty(sent)) {
		zp__message_out *message = ZP__ELEMENT(sent->next, zp__message_out, node);
		if (message->sequence > frames)
			break;
		zp__list_remove(&message->node);
		zp__message_sent(c->link, message);
	}
}

/* False: it has been sent again too often. */
static bool resend(zp__link *link, zp__flow *flow, zp__list *frame, bool had_left)
{
	zp__attempt *attempt = flow->attempt;
	if (attempt) {
		if (attempt->resent_frames++ >= ZP__RESENDS_PER_SLOT_MAX * attempt->layout.slot_count + ZP__RESENDS_MIN)
			return false;
		if (had_left)
			attempt->algorithm->unsent(attempt, ZP__ELEMENT(frame, zp__slot, node));
	} else if (ZP__ELEMENT(frame, zp__message_out, node)->resent++ >= ZP__MESSAGE_RESENDS_MAX) {
		return false;
	}
	link->resent_frames++;
	if (zp__list_empty(&flow->frames))
		zp__list_append(&link->flows, &flow->node);
	zp__list_append(flow->frames.next, frame); /* Before the first: others wait for it longest. */
	zp__link_wake_idle(link);
	return true;
}

/* Queues again what `c` has sent of a flow beyond the frames that arrived. */
static void flow_settle(zp__connection *c, zp__flow *flow)
{
	zp__list *sent = &flow->sent[c->index];
	zp__attempt *attempt = flow->attempt;
	while (!zp__list_empty(sent)) { /* The last one first, so that they come into the queue in order. */
		zp__list *frame = sent->previous;
		uint64_t sequence = *sequence_of(flow, frame);
		bool arrived = sequence <= c->settling.told_frames;
		zp__list_remove(frame);
		if (attempt && (arrived || attempt->status < 0 || attempt->ending))
			continue;
		if (!attempt && arrived) {
			zp__message_sent(c->link, ZP__ELEMENT(frame, zp__message_out, node));
			continue;
		}
		if (resend(c->link, flow, frame, sequence <= c->settling.tx_frames))
			continue;
		if (attempt) {
			zp__attempt_fail(attempt, -ECONNRESET, c->link->peer);
		} else {
			zp__message_sent(c->link, ZP__ELEMENT(frame, zp__message_out, node));
			zp__link_lose(c->link, -ECONNRESET, true);
		}
	}
}

static void tell(zp__connection *c)
{
	zp__link *link = c->link;
	zp__event *event = &c->settling.event;
	event->event = (zp_event){.kind = ZP_EVENT_CONNECTION_LOST,
				  .status = c->lost_status,
				  .id = link->id,
				  .connection = c->index,
				  .generation = c->settling.generation};
	memcpy(event->event.peer, link->peer, ZP_PEER_ID_BYTES);
	if (!zp__list_empty(&event->node)) /* The loss before this one has not been polled: this one is enough. */
		return;
	link->references++;
	zp__event_push(&link->engine->queue, event);
}

/* The connection is closed here and at the other end, and both numbers are known. */
static void finish(zp__connection *c)
{
	zp__settling *s = &c->settling;
	zp__link *link = c->link;
	s->closed = false;
	if (s->told_frames > s->tx_frames) {
		zp__link_lose(link, -EPROTO, true);
		return;
	}
	ZP__EACH(node, &link->open_flows)
	{
		flow_settle(c, ZP__ELEMENT(node, zp__flow, open_node));
		if (!link->open)
			return;
	}
	link->lost_count++;
	tell(c);
}

/* The connection has been closed, and its link is open. */
void zp__settle_closed(zp__connection *c)
{
	zp__settling *s = &c->settling;
	zp__link *link = c->link;
	if (c->tx.active)
		keep(c, s->tx_frames + 1); /* A part of it may be on its way. */
	if (c->rx.attempt)
		c->rx.attempt->algorithm->cut(c);
	while (!zp__list_empty(&s->carried)) {
		zp__control *settle = ZP__ELEMENT(s->carried.next, zp__control, node);
		zp__list_remove(&settle->node);
		control_offer(settle);
	}
	s->closed = true;
	control_forget(&s->confirm);
	settle_offer(c, s->generation, s->rx_frames);
	for (uint32_t i = 0; i < link->connection_count; i++)
		if (link->connections[i].settling.has_messages)
			confirm_offer(&link->connections[i]);
	if (s->told)
		finish(c);
}

static enum zp__verdict settle_admit(zp__connection *c, uint32_t generation, uint64_t frames)
{
	zp__settling *s = &c->settling;
	if (generation > s->generation && generation > s->generation_spent) { /* Only the other end has had it. */
		if (c->fd >= 0 || s->closed)
			return ZP__VIOLATION;
		s->generation_spent = generation;
		settle_offer(c, generation, 0);
		return ZP__DROP;
	}
	if (generation != s->generation || s->told)
		return ZP__DROP; /* It has come before. */
	s->told = true;
	s->told_frames = frames;
	if (s->closed)
		finish(c);
	else
		zp__connection_lose(c, -ECONNRESET);
	return ZP__DROP;
}

/* A SETTLE or CONFIRM came. */
enum zp__verdict zp__settle_admit(zp__connection *c)
{
	const zp__frame *frame = &c->rx.frame;
	if (frame->lane || frame->length || frame->chunk >= c->link->connection_count || frame->id > UINT32_MAX)
		return ZP__VIOLATION;
	zp__connection *about = &c->link->connections[frame->chunk];
	if (!c->link->open)
		return ZP__DROP;
	if (frame->kind == ZP__SETTLE)
		return settle_admit(about, (uint32_t)frame->id, frame->offset);
	if (frame->id == about->settling.generation) /* Else it was overtaken. */
		confirm(about, frame->offset);
	return ZP__DROP;
}

int zp__settle_may_add(const zp__connection *c, uint32_t generation)
{
	const zp__settling *s = &c->settling;
	if (c->fd >= 0 || s->closed)
		return -EBUSY;
	return generation > s->generation && generation > s->generation_spent ? 0 : -ESTALE;
}

/* A connection was put into a free place. */
void zp__settle_added(zp__connection *c, uint32_t generation)
{
	zp__settling *s = &c->settling;
	control_forget(&s->settle); /* The other end has got it, else the place would not be free there. */
	s->generation = generation;
	s->tx_frames = s->rx_frames = s->confirmed = s->told_frames = 0;
	s->told = s->has_messages = false;
}

/* The link is lost: nothing is settled any more. */
void zp__settle_discard(zp__link *link)
{
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		control_forget(&c->settling.settle);
		control_forget(&c->settling.confirm);
		confirm(c, UINT64_MAX);
		c->settling.closed = false;
	}
}
