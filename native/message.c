/* Messages on channels: frames that are delivered as events. Everything here runs under the lock.
 *
 * Bounds. Messages that are being received, or were received and not released, are charged with the memory they take,
 * against messages_queued_bytes_max of the engine. An early frame (early.c) is charged with at least
 * ZP__EARLY_CHARGE_MIN, which bounds their number. At the bound a link gets no more than an equal share of it: its
 * connections whose next frame is a message stop receiving, and TCP pushes back. So no link can take the room of
 * others. If the body of a message does not come, its link is lost (zp__links_check). Messages that are queued, or sent
 * and not acknowledged, count against the same bound per link, or a lower one of the caller, a short one as
 * ZP__SENT_CHARGE_MIN: a peer that asks and does not read the answers would use many times the bound otherwise. At the
 * bound zp_message_post() fails, and a WRITABLE event follows. If a link has no other message, one of any size is
 * accepted. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "early.h"
#include "engine.h"
#include "message.h"
#include "sock.h"

static bool is_pooled(uint64_t bytes)
{
	return bytes >= ZP__BUFFER_BYTES_MIN && bytes <= ZP__BUFFER_BYTES;
}

/* Lock held. Takes a spare buffer for `bytes`. NULL: there is none. */
static void *buffer_take(zp_engine *engine, uint64_t bytes)
{
	if (!is_pooled(bytes) || zp__list_empty(&engine->buffers))
		return NULL;
	/* The buffer used last: it may still be in the cache. */
	zp__buffer *buffer = ZP__ELEMENT(engine->buffers.previous, zp__buffer, node);
	zp__list_remove(&buffer->node);
	engine->buffer_count--;
	return buffer;
}

/* Allocates `bytes`, to be freed with buffer_give(). */
static void *buffer_new(uint64_t bytes)
{
	return malloc(is_pooled(bytes) ? ZP__BUFFER_BYTES : bytes);
}

/* Lock held. */
static void buffer_give(zp_engine *engine, void *memory, uint64_t bytes)
{
	if (!is_pooled(bytes) || engine->buffer_count == ZP__BUFFERS_SPARE_MAX || engine->stopping) {
		free(memory);
		return;
	}
	zp__buffer *buffer = memory;
	zp__list_init(&buffer->node);
	buffer->idle_ns = zp__now_ns();
	zp__list_append(&engine->buffers, &buffer->node);
	if (engine->buffer_count++ == 0)
		zp__thread_wake(&engine->threads[0]); /* That thread trims the buffers. */
}

uint64_t zp__buffers_trim(zp_engine *engine, uint64_t now_ns)
{
	while (!zp__list_empty(&engine->buffers)) {
		zp__buffer *buffer = ZP__ELEMENT(engine->buffers.next, zp__buffer, node);
		if (buffer->idle_ns + ZP__POOL_IDLE_NS > now_ns)
			return buffer->idle_ns + ZP__POOL_IDLE_NS;
		zp__list_remove(&buffer->node);
		engine->buffer_count--;
		free(buffer);
	}
	return UINT64_MAX;
}

static zp__channel *channel_find(zp_engine *engine, uint64_t id)
{
	ZP__EACH(node, &engine->channels)
	{
		zp__channel *channel = ZP__ELEMENT(node, zp__channel, node);
		if (channel->id == id)
			return channel;
	}
	return NULL;
}

static void channel_free(zp__channel *channel)
{
	if (channel && channel->own.fd >= 0)
		close(channel->own.fd);
	free(channel);
}

int zp_channel_open(zp_engine *engine, uint64_t id, int fd)
{
	zp__channel *channel = calloc(1, sizeof *channel);
	if (!channel)
		return -ENOMEM;
	channel->id = id;
	zp__list_init(&channel->writable.node);
	zp__list_init(&channel->own.events);
	zp__list_init(&channel->own.messages);
	channel->queue = fd < 0 ? &engine->queue : &channel->own;
	channel->own.fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
	int rc = fd >= 0 && channel->own.fd < 0 ? -errno : 0;
	pthread_mutex_lock(&engine->mutex);
	if (rc == 0 && engine->stopping)
		rc = -ESHUTDOWN;
	if (rc == 0 && channel_find(engine, id))
		rc = -EEXIST;
	if (rc == 0) {
		zp__list_append(&engine->channels, &channel->node);
		zp__channel_learn(engine, id);
	}
	if (rc == 0 && id < ZP_FREE_CHANNEL) {
		ZP__EACH(node, &engine->links)
		zp__opened_offer(ZP__ELEMENT(node, zp__link, node));
	}
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		channel_free(channel);
	return rc;
}

/* Drops messages of a channel that wait to be sent. */
static void messages_withdraw(zp__link *link, uint64_t channel)
{
	ZP__EACH(node, &link->messages.frames)
	{
		zp__message_out *message = ZP__ELEMENT(node, zp__message_out, node);
		if (message->channel != channel)
			continue;
		zp__list_remove(node);
		zp__message_sent(link, message);
	}
	if (zp__list_empty(&link->messages.frames))
		zp__list_remove(&link->messages.node);
}

int zp_channel_close(zp_engine *engine, uint64_t id)
{
	pthread_mutex_lock(&engine->mutex);
	zp__channel *channel = channel_find(engine, id);
	if (channel) {
		zp__list_remove(&channel->node);
		zp__event_withdraw(engine, &channel->writable);
		ZP__EACH(node, &channel->queue->messages)
		{
			zp__event *event = ZP__ELEMENT(node, zp__event, node);
			if (event->event.id != id)
				continue;
			zp__event_withdraw(engine, event);
			zp__message_forget(engine, ZP__ELEMENT(event, zp__message_in, event));
		}
		ZP__EACH(node, &engine->links)
		messages_withdraw(ZP__ELEMENT(node, zp__link, node), id);
	}
	zp__channel_learn(engine, id);
	pthread_mutex_unlock(&engine->mutex);
	channel_free(channel);
	return 0;
}

int zp_channel_poll(zp_engine *engine, uint64_t id, zp_event *result)
{
	pthread_mutex_lock(&engine->mutex);
	zp__channel *channel = channel_find(engine, id);
	zp__event *event = channel && !engine->stopping ? zp__event_next(&channel->own) : NULL;
	if (event) {
		*result = event->event;
		zp__list_remove(&event->node);
	}
	pthread_mutex_unlock(&engine->mutex);
	return event != NULL;
}

/* True if the link may receive `bytes` more. */
static bool has_room(const zp__link *link, uint64_t bytes)
{
	const zp_engine *engine = link->engine;
	uint64_t bound = engine->config.messages_queued_bytes_max;
	return !link->received_bytes || engine->messages_bytes + bytes <= bound ||
	       link->received_bytes + bytes <= bound / engine->link_count;
}

uint64_t zp__early_charge(uint64_t body_bytes)
{
	uint64_t bytes = sizeof(zp__message_in) + body_bytes;
	return bytes > ZP__EARLY_CHARGE_MIN ? bytes : ZP__EARLY_CHARGE_MIN;
}

/* Allocates memory for the body of the frame in c->rx and charges for it. */
static enum zp__verdict message_begin(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	const zp__frame *frame = &c->rx.frame;
	uint64_t bytes = sizeof(zp__message_in) + frame->length;
	uint64_t charged = frame->kind == ZP__MESSAGE ? bytes : zp__early_charge(frame->length);
	if (!has_room(c->link, charged))
		return ZP__PARK;
	zp__message_in *message = buffer_take(engine, bytes);
	if (!message)
		message = buffer_new(bytes);
	if (!message)
		return engine->messages_bytes ? ZP__PARK : ZP__NO_MEMORY;
	message->link = c->link;
	message->link->references++;
	message->link->received_bytes += charged;
	message->bytes = frame->length;
	message->charged = charged;
	zp__list_init(&message->event.node);
	zp__list_append(&engine->messages, &message->node);
	engine->messages_bytes += charged;
	c->rx.message = message;
	c->rx.body = message->body;
	c->rx.due_ns = zp__now_ns() + zp__stall_timeout_ns(engine);
	return ZP__ADMIT;
}

enum zp__verdict zp__message_admit(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	const zp__frame *frame = &c->rx.frame;
	if (frame->chunk || frame->offset || frame->length > engine->config.message_bytes_max)
		return ZP__VIOLATION;
	if (!c->link->open)
		return ZP__DROP;
	if (!channel_find(engine, frame->id))
		return zp__channel_is_known(engine, frame->id) ? ZP__DROP : ZP__PARK;
	return message_begin(c);
}

/* Admits a frame of an attempt that is not begun here: it is received like a message. */
enum zp__verdict zp__early_admit(zp__connection *c)
{
	if (!c->link->open)
		return ZP__DROP;
	return c->rx.frame.length <= c->link->engine->config.message_bytes_max ? message_begin(c) : ZP__PARK;
}

/* Frees a message that was received in part or completely, and unparks connections that waited for its bytes. */
void zp__message_forget(zp_engine *engine, zp__message_in *message)
{
	zp__link *link = message->link;
	engine->messages_bytes -= message->charged;
	link->received_bytes -= message->charged;
	zp__list_remove(&message->node);
	buffer_give(engine, message, sizeof *message + message->bytes);
	zp__link_release(link);
	zp__unpark_all(engine);
}

void zp__message_landed(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	zp__message_in *message = c->rx.message;
	c->rx.message = NULL;
	if (c->rx.frame.kind != ZP__MESSAGE && c->link->open) {
		message->frame = c->rx.frame;
		message->checksum = c->rx.checksum;
		zp__early_keep(message);
		return;
	}
	bool is_message = c->rx.frame.kind == ZP__MESSAGE;
	zp__channel *channel = is_message ? channel_find(engine, c->rx.frame.id) : NULL;
	if (!channel) { /* The channel was closed during reception, or the link was lost. */
		zp__message_forget(engine, message);
		return;
	}
	message->event.event = (zp_event){.kind = ZP_EVENT_MESSAGE,
					  .id = c->rx.frame.id,
					  .body = message->body,
					  .body_bytes = message->bytes};
	memcpy(message->event.event.peer, c->link->peer, ZP_PEER_ID_BYTES);
	zp__event_push(channel->queue, &message->event);
}

void zp_message_release(zp_engine *engine, uint8_t *body)
{
	if (!body)
		return;
	pthread_mutex_lock(&engine->mutex);
	zp__message_forget(engine, ZP__ELEMENT(body, zp__message_in, body));
	pthread_mutex_unlock(&engine->mutex);
}

static void writable_report(zp__link *link)
{
	if (!link->open || link->writable_bytes == UINT64_MAX || link->message_bytes > link->writable_bytes)
		return;
	link->writable_bytes = UINT64_MAX;
	ZP__EACH(node, &link->engine->channels)
	{
		zp__channel *channel = ZP__ELEMENT(node, zp__channel, node);
		if (!channel->waits)
			continue;
		channel->waits = false;
		channel->writable.event = (zp_event){.kind = ZP_EVENT_WRITABLE, .id = channel->id};
		if (zp__list_empty(&channel->writable.node)) /* If the previous one was not polled yet, it suffices. */
			zp__event_push(channel->queue, &channel->writable);
	}
}

static uint64_t sent_charge(const zp__message_out *message)
{
	return message->bytes > ZP__SENT_CHARGE_MIN ? message->bytes : ZP__SENT_CHARGE_MIN;
}

/* Frees a message that the other end has acknowledged, or that is lost with its link. */
void zp__message_sent(zp__link *link, zp__message_out *message)
{
	link->message_bytes -= sent_charge(message);
	buffer_give(link->engine, message, sizeof *message + message->bytes);
	writable_report(link);
}

void zp__message_flow_clear(zp__link *link)
{
	while (!zp__list_empty(&link->messages.frames)) {
		zp__list *node = link->messages.frames.next;
		zp__list_remove(node);
		zp__message_sent(link, ZP__ELEMENT(node, zp__message_out, node));
	}
	zp__list_remove(&link->messages.node);
}

/* Makes a message for a body of `bytes`, in `memory` from buffer_take() unless that is NULL. NULL: no memory. */
static zp__message_out *message_new(void *memory, uint64_t channel, uint64_t bytes)
{
	zp__message_out *message = memory ? memory : buffer_new(sizeof *message + bytes);
	if (!message)
		return NULL;
	zp__list_init(&message->node);
	message->resent = 0;
	message->channel = channel;
	message->bytes = (uint32_t)bytes;
	return message;
}

/* Lock held. */
static void message_offer(zp__link *link, zp__message_out *message)
{
	link->message_bytes += sent_charge(message);
	zp__link_offer(link, &link->messages, &message->node);
}

/* Lock held. 0: `*link` is the link to `peer`, and may queue `bytes` more. -EAGAIN: it may not; WRITABLE will follow on
 * the channel. */
static int link_writable(zp_engine *engine, const uint8_t peer[], uint64_t id, uint64_t bytes, uint64_t bytes_max,
			 zp__link **link)
{
	if (engine->stopping)
		return -ESHUTDOWN;
	zp__channel *channel = channel_find(engine, id);
	if (!channel)
		return -ECANCELED;
	*link = zp__link_find(engine, peer);
	if (!*link)
		return -ENOTCONN;
	uint64_t beside = bytes < bytes_max ? bytes_max - bytes : 0; /* Bytes that are left for other messages. */
	if ((*link)->message_bytes <= beside)
		return 0;
	uint64_t at = beside < bytes_max / 2 ? beside : bytes_max / 2;
	if ((*link)->writable_bytes == UINT64_MAX || at > (*link)->writable_bytes) /* Several may wait: nobody too long. */
		(*link)->writable_bytes = at;
	channel->waits = true;
	return -EAGAIN;
}

void zp__message_send(zp_engine *engine, const uint8_t peer[], uint64_t channel, const void *body, size_t bytes)
{
	zp__link *link = zp__link_find(engine, peer);
	bool has_room = link && link->message_bytes + bytes <= engine->config.messages_queued_bytes_max;
	zp__message_out *message = has_room ? message_new(NULL, channel, bytes) : NULL;
	if (!message)
		return;
	memcpy(message->body, body, bytes);
	message->checksum = (uint32_t)zp__checksum_of(message->body, bytes);
	message_offer(link, message);
}

int zp_message_post(zp_engine *engine, const uint8_t peer[], uint64_t channel, const void *head, uint64_t head_bytes,
		    const void *body, uint64_t body_bytes, uint64_t queue_bytes_max)
{
	uint64_t longest = engine->config.message_bytes_max, bytes_max = engine->config.messages_queued_bytes_max;
	if (head_bytes > longest || body_bytes > longest - head_bytes)
		return -EMSGSIZE;
	uint64_t bytes = head_bytes + body_bytes;
	if (queue_bytes_max < bytes_max)
		bytes_max = queue_bytes_max;
	zp__link *link;
	pthread_mutex_lock(&engine->mutex); /* Check before copying the body, to fail cheaply, */
	int rc = link_writable(engine, peer, channel, bytes, bytes_max, &link);
	void *memory = rc == 0 ? buffer_take(engine, sizeof(zp__message_out) + bytes) : NULL;
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		return rc;
	zp__message_out *message = message_new(memory, channel, bytes);
	if (!message)
		return -ENOMEM;
	if (head_bytes)
		memcpy(message->body, head, head_bytes);
	if (body_bytes)
		memcpy(message->body + head_bytes, body, body_bytes);
	message->checksum = (uint32_t)zp__checksum_of(message->body, bytes);

	pthread_mutex_lock(&engine->mutex); /* and after it, because other threads may have filled the queue. */
	rc = link_writable(engine, peer, channel, bytes, bytes_max, &link);
	if (rc == 0)
		message_offer(link, message);
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		free(message);
	return rc;
}
