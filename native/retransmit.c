/* Retransmission: when one of several connections of a link is lost, both ends tell each other how many of its frames
 * they received, and send the missing ones again over the other connections.
 *
 *        live --- error, end of stream, silence, or FINAL_ACK received ---> closing
 *         ^                                                                    | its thread closes the fd
 *         | zp_link_add()                                                      v and sends FINAL_ACK
 *        free <--- the other end's FINAL_ACK is here: frames beyond its ---  closed
 *                  number are queued again
 *
 * Frames of one connection arrive in order, so one number describes them all. The number in a FINAL_ACK is final
 * because the connection is closed before it is made. An end retransmits only after the other end's FINAL_ACK has come,
 * and by then the other end has discarded the frame that it had received in part: so no frame arrives twice. A
 * FINAL_ACK may go over any live connection. If that connection is lost as well the FINAL_ACK is sent again at once,
 * because otherwise two lost connections could wait for each other; a repeated FINAL_ACK is ignored.
 *
 * A sender must keep what it may have to retransmit. For frames of an attempt this costs nothing: their bytes stay in
 * the tensor until the attempt ends. Only a reduce-scatter frame is overwritten earlier, by the all-gather frame of its
 * slot. That frame has passed through the rest of the ring after ours, which proves that ours has arrived; ring.c then
 * removes the slot from the list of sent frames. Messages are kept until an ACK reports the number of frames received.
 * ACKs are not retransmitted: whenever a connection of the link is lost, new ones are sent.
 *
 * Generations. zp_link_add() replaces a connection first at the end that was dialled, and only after both ends have
 * finished with the previous generation. So that end has received our FINAL_ACK of the previous generation, and at most
 * one generation at a time is known to one end only. If it is lost before the other end has added it, the other end
 * answers the FINAL_ACK with one that reports zero frames.
 *
 * A peer that reports false numbers only loses its own frames or gets them twice. The number of retransmissions is
 * bounded (ZP__RESENDS_PER_SLOT_MAX), and so is the number of frames that arrive in part. Everything here expects the
 * lock held. */
#include <errno.h>
#include <string.h>

#include "attempt.h"
#include "early.h"
#include "engine.h"
#include "link.h"
#include "message.h"
#include "retransmit.h"

static void control_init(zp__control *control, zp__connection *connection, uint8_t kind)
{
	control->connection = connection;
	control->kind = kind;
	zp__list_init(&control->node);
}

void zp__retransmit_init(zp__connection *c)
{
	zp__retransmit *s = &c->retransmit;
	control_init(&s->final_ack, c, ZP__FINAL_ACK);
	control_init(&s->ack, c, ZP__ACK);
	zp__list_init(&s->carried);
	zp__list_init(&s->event.node);
}

/* Takes the acknowledgement out of the queue, or, if it is being sent or was sent, prevents its retransmission. */
static void control_forget(zp__control *control)
{
	zp__link *link = control->connection->link;
	zp__list_remove(&control->node);
	for (uint32_t i = 0; control->kind == ZP__FINAL_ACK && i < link->connection_count; i++)
		if (link->connections[i].tx.final_ack_of == control->connection)
			link->connections[i].tx.final_ack_of = NULL;
}

static void control_offer(zp__control *control)
{
	zp__link *link = control->connection->link;
	zp__list_append(&link->control, &control->node);
	zp__link_wake_any(link);
}

static void final_ack_offer(zp__connection *c, uint32_t generation, uint64_t frames)
{
	zp__control *final_ack = &c->retransmit.final_ack;
	control_forget(final_ack);
	final_ack->generation = generation;
	final_ack->frames = frames;
	control_offer(final_ack);
}

static void ack_offer(zp__connection *c)
{
	if (c->fd >= 0 && !c->closing && zp__list_empty(&c->retransmit.ack.node))
		control_offer(&c->retransmit.ack);
}

/* Puts the next acknowledgement of the link into c->tx. False: there is none. */
bool zp__retransmit_take(zp__connection *c)
{
	zp__link *link = c->link;
	if (zp__list_empty(&link->control))
		return false;
	zp__control *control = ZP__ELEMENT(link->control.next, zp__control, node);
	zp__connection *about = control->connection;
	bool final = control->kind == ZP__FINAL_ACK;
	zp__list_remove(&control->node);
	zp__frame frame = {.kind = control->kind,
			   .chunk = about->index,
			   .id = final ? control->generation : about->retransmit.generation,
			   .offset = final ? control->frames : about->retransmit.rx_frames};
	c->tx = (zp__transmit){.active = true, .final_ack_of = final ? about : NULL};
	zp__frame_encode(c->tx.header, &frame);
	return true;
}

static uint64_t *sequence_of(const zp__flow *flow, zp__list *frame)
{
	return flow->attempt ? &ZP__ELEMENT(frame, zp__slot, node)->sequence
			     : &ZP__ELEMENT(frame, zp__message_out, node)->sequence;
}

/* Records that the frame in c->tx was sent as number `sequence` of its connection, so that it can be retransmitted. */
static void keep(zp__connection *c, uint64_t sequence)
{
	zp__transmit *tx = &c->tx;
	if (tx->final_ack_of)
		zp__list_append(&c->retransmit.carried, &tx->final_ack_of->retransmit.final_ack.node);
	if (tx->flow) {
		zp__list *frame = tx->message ? &tx->message->node : &tx->slot->node;
		*sequence_of(tx->flow, frame) = sequence;
		zp__list_append(&tx->flow->sent[c->index], frame);
	}
}

/* The frame in c->tx was sent completely. */
void zp__retransmit_sent(zp__connection *c)
{
	uint64_t sequence = ++c->retransmit.tx_frames;
	if (c->tx.message && (!c->link->open || sequence <= c->retransmit.acknowledged))
		zp__message_sent(c->link, c->tx.message);
	else if (c->link->open)
		keep(c, sequence);
}

/* The frame in c->rx was received completely. */
void zp__retransmit_received(zp__connection *c)
{
	c->retransmit.rx_frames++;
	if (c->rx.frame.kind != ZP__MESSAGE || !c->link->open)
		return;
	c->retransmit.has_messages = true;
	ack_offer(c);
}

/* The other end has received the first `frames` frames of `c`: frees their messages. */
static void acknowledge(zp__connection *c, uint64_t frames)
{
	zp__list *sent = &c->link->messages.sent[c->index];
	if (frames > c->retransmit.acknowledged)
		c->retransmit.acknowledged = frames;
	while (!zp__list_empty(sent)) {
		zp__message_out *message = ZP__ELEMENT(sent->next, zp__message_out, node);
		if (message->sequence > frames)
			break;
		zp__list_remove(&message->node);
		zp__message_sent(c->link, message);
	}
}

/* Counts a frame of an attempt that must be sent again, by us or to us. False: there were too many. */
static bool may_come_again(zp__attempt *attempt)
{
	return attempt->resent_frames++ < ZP__RESENDS_PER_SLOT_MAX * attempt->layout.slot_count + ZP__RESENDS_MIN;
}

/* Queues a frame again. False: it has been retransmitted too often. */
static bool resend(zp__link *link, zp__flow *flow, zp__list *frame, bool had_left)
{
	zp__attempt *attempt = flow->attempt;
	if (attempt) {
		if (!may_come_again(attempt))
			return false;
		if (had_left)
			attempt->algorithm->unsent(attempt, ZP__ELEMENT(frame, zp__slot, node));
	} else if (ZP__ELEMENT(frame, zp__message_out, node)->resent++ >= ZP__MESSAGE_RESENDS_MAX) {
		return false;
	}
	if (zp__list_empty(&flow->frames))
		zp__list_append(&link->flows, &flow->node);
	zp__list_append(flow->frames.next, frame); /* Before the first: it is the oldest. */
	zp__link_wake_idle(link);
	return true;
}

/* Queues again the frames of a flow that `c` has sent and the other end has not received. */
static void flow_retransmit(zp__connection *c, zp__flow *flow)
{
	zp__list *sent = &flow->sent[c->index];
	zp__attempt *attempt = flow->attempt;
	while (!zp__list_empty(sent)) { /* From the last, because each one goes to the head of the queue. */
		zp__list *frame = sent->previous;
		uint64_t sequence = *sequence_of(flow, frame);
		bool arrived = sequence <= c->retransmit.final_ack_frames;
		zp__list_remove(frame);
		if (attempt && (arrived || attempt->status < 0 || attempt->ending))
			continue;
		if (!attempt && arrived) {
			zp__message_sent(c->link, ZP__ELEMENT(frame, zp__message_out, node));
			continue;
		}
		if (resend(c->link, flow, frame, sequence <= c->retransmit.tx_frames))
			continue;
		if (attempt) {
			zp__attempt_fail(attempt, -ECONNRESET, c->link->peer);
		} else {
			zp__message_sent(c->link, ZP__ELEMENT(frame, zp__message_out, node));
			zp__link_lose(c->link, -ECONNRESET, true);
		}
	}
}

static void connection_lost_report(zp__connection *c)
{
	zp__link *link = c->link;
	zp__event *event = &c->retransmit.event;
	event->event = (zp_event){.kind = ZP_EVENT_CONNECTION_LOST,
				  .status = c->lost_status,
				  .id = link->id,
				  .connection = c->index,
				  .generation = c->retransmit.generation};
	memcpy(event->event.peer, link->peer, ZP_PEER_ID_BYTES);
	if (!zp__list_empty(&event->node)) /* The event of an earlier loss is still queued and is now this one. */
		return;
	link->references++;
	zp__event_push(&link->engine->queue, event);
}

/* The connection is closed at both ends, and both know how many frames arrived. */
static void retransmit(zp__connection *c)
{
	zp__retransmit *s = &c->retransmit;
	zp__link *link = c->link;
	s->closed = false;
	if (s->final_ack_frames > s->tx_frames) {
		zp__link_lose(link, -EPROTO, true);
		return;
	}
	ZP__EACH(node, &link->open_flows)
	{
		flow_retransmit(c, ZP__ELEMENT(node, zp__flow, open_node));
		if (!link->open)
			return;
	}
	link->lost_count++;
	connection_lost_report(c);
}

/* The connection has been closed, and its link is open. */
void zp__retransmit_closed(zp__connection *c)
{
	zp__retransmit *s = &c->retransmit;
	zp__link *link = c->link;
	if (c->tx.active)
		keep(c, s->tx_frames + 1); /* A part of it may have been sent. */
	if (c->rx.attempt) {
		c->rx.attempt->algorithm->cut(&c->rx);
		if (!may_come_again(c->rx.attempt))
			zp__attempt_fail(c->rx.attempt, -ECONNRESET, link->peer);
	}
	while (!zp__list_empty(&s->carried)) {
		zp__control *final_ack = ZP__ELEMENT(s->carried.next, zp__control, node);
		zp__list_remove(&final_ack->node);
		control_offer(final_ack);
	}
	s->closed = true;
	control_forget(&s->ack);
	final_ack_offer(c, s->generation, s->rx_frames);
	for (uint32_t i = 0; i < link->connection_count; i++)
		if (link->connections[i].retransmit.has_messages)
			ack_offer(&link->connections[i]);
	zp__announce_again(link);
	if (s->final_ack_received)
		retransmit(c);
}

static enum zp__verdict final_ack_admit(zp__connection *c, uint32_t generation, uint64_t frames)
{
	zp__retransmit *s = &c->retransmit;
	if (generation > s->generation && generation > s->generation_spent) { /* It was never added here. */
		if (c->fd >= 0 || s->closed)
			return ZP__VIOLATION;
		s->generation_spent = generation;
		final_ack_offer(c, generation, 0);
		return ZP__DROP;
	}
	if (generation != s->generation || s->final_ack_received)
		return ZP__DROP; /* A repetition. */
	s->final_ack_received = true;
	s->final_ack_frames = frames;
	if (s->closed)
		retransmit(c);
	else
		zp__connection_lose(c, -ECONNRESET);
	return ZP__DROP;
}

/* The frame in c->rx is a FINAL_ACK or an ACK. */
enum zp__verdict zp__retransmit_admit(zp__connection *c)
{
	const zp__frame *frame = &c->rx.frame;
	if (frame->length || frame->chunk >= c->link->connection_count || frame->id > UINT32_MAX)
		return ZP__VIOLATION;
	zp__connection *about = &c->link->connections[frame->chunk];
	if (!c->link->open)
		return ZP__DROP;
	if (frame->kind == ZP__FINAL_ACK)
		return final_ack_admit(about, (uint32_t)frame->id, frame->offset);
	if (frame->id == about->retransmit.generation) /* Otherwise a newer generation has overtaken it. */
		acknowledge(about, frame->offset);
	return ZP__DROP;
}

int zp__retransmit_may_add(const zp__connection *c, uint32_t generation)
{
	const zp__retransmit *s = &c->retransmit;
	if (c->fd >= 0 || s->closed)
		return -EBUSY;
	return generation > s->generation && generation > s->generation_spent ? 0 : -ESTALE;
}

/* zp_link_add() has put a connection at this index. */
void zp__retransmit_added(zp__connection *c, uint32_t generation)
{
	zp__retransmit *s = &c->retransmit;
	control_forget(&s->final_ack); /* The other end has received it: only then could it add this one. */
	s->generation = generation;
	s->tx_frames = s->rx_frames = s->acknowledged = s->final_ack_frames = 0;
	s->final_ack_received = s->has_messages = false;
}

/* The link is lost: from now on nothing is retransmitted. */
void zp__retransmit_discard(zp__link *link)
{
	for (uint32_t i = 0; i < link->connection_count; i++) {
		zp__connection *c = &link->connections[i];
		control_forget(&c->retransmit.final_ack);
		control_forget(&c->retransmit.ack);
		acknowledge(c, UINT64_MAX);
		c->retransmit.closed = false;
	}
}
