/* Messages on channels: whole frames that are delivered as events. Everything is under the lock.
 *
 * Bounds. What was received (or is being received) and not released counts against messages_queued_bytes_max of the
 * engine; at the bound connections whose next frame is a message wait, and TCP pushes back. What is queued for sending,
 * or sent and not yet confirmed by the other end, counts against the same number for each link, or a lower one of the
 * caller's; at the bound zp_message_post() fails, and an event tells of room. One message may always pass. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "digest.h"
#include "zp_internal.h"

static bool is_pooled(uint64_t bytes)
{
	return bytes >= ZP__BUFFER_BYTES_MIN && bytes <= ZP__BUFFER_BYTES;
}

/* Lock held. Memory of so many bytes that was used before; NULL: there is none. */
static void *buffer_take(zp_engine *engine, uint64_t bytes)
{
	if (!is_pooled(bytes) || zp__list_empty(&engine->buffers))
		return NULL;
	zp__buffer *buffer = ZP__ELEMENT(engine->buffers.previous, zp__buffer, node); /* Perhaps it is in the cache yet. */
	zp__list_remove(&buffer->node);
	engine->buffer_count--;
	return buffer;
}

/* New memory of so many bytes, as buffer_give() takes it. */
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
		zp__thread_wake(&engine->threads[0]); /* It trims. */
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

/* The threads have ended. */
void zp__buffers_discard(zp_engine *engine)
{
	zp__buffers_trim(engine, UINT64_MAX);
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
	zp__list_init(&channel->room.node);
	zp__list_init(&channel->own.events);
	channel->queue = fd < 0 ? &engine->queue : &channel->own;
	channel->own.fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
	int rc = fd >= 0 && channel->own.fd < 0 ? -errno : 0;
	pthread_mutex_lock(&engine->mutex);
	if (rc == 0 && channel_find(engine, id))
		rc = -EEXIST;
	if (rc == 0) {
		zp__list_append(&engine->channels, &channel->node);
		zp__id_told(engine, id);
	}
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		channel_free(channel);
	return rc;
}

int zp_channel_close(zp_engine *engine, uint64_t id)
{
	pthread_mutex_lock(&engine->mutex);
	zp__channel *channel = channel_find(engine, id);
	if (channel) {
		zp__list_remove(&channel->node);
		zp__event_withdraw(engine, &channel->room);
		ZP__EACH(node, &channel->queue->events)
		{
			zp__event *event = ZP__ELEMENT(node, zp__event, node);
			if (event->event.kind != ZP_EVENT_MESSAGE || event->event.id != id)
				continue;
			zp__event_withdraw(engine, event);
			zp__message_forget(engine, ZP__ELEMENT(event, zp__message_in, event));
		}
	}
	zp__id_told(engine, id);
	pthread_mutex_unlock(&engine->mutex);
	channel_free(channel);
	return 0;
}

int zp_channel_poll(zp_engine *engine, uint64_t id, zp_event *result)
{
	pthread_mutex_lock(&engine->mutex);
	zp__channel *channel = channel_find(engine, id);
	bool found = channel && !zp__list_empty(&channel->own.events);
	if (found) {
		zp__event *event = ZP__ELEMENT(channel->own.events.next, zp__event, node);
		*result = event->event;
		zp__list_remove(&event->node);
	}
	pthread_mutex_unlock(&engine->mutex);
	return found;
}

enum zp__verdict zp__message_admit(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	const zp__frame *frame = &c->rx.frame;
	if (frame->lane || frame->chunk || frame->offset || frame->length > engine->config.message_bytes_max)
		return ZP__VIOLATION;
	if (!channel_find(engine, frame->id))
		return zp__id_is_known(engine, frame->id) ? ZP__DROP : ZP__PARK;
	uint64_t bound = engine->config.messages_queued_bytes_max;
	if (engine->messages_bytes && engine->messages_bytes + frame->length > bound)
		return ZP__PARK;
	zp__message_in *message = buffer_take(engine, sizeof *message + frame->length);
	if (!message)
		message = buffer_new(sizeof *message + frame->length);
	if (!message)
		return engine->messages_bytes ? ZP__PARK : ZP__NO_MEMORY;
	message->bytes = frame->length;
	zp__list_init(&message->event.node);
	zp__list_append(&engine->messages, &message->node);
	engine->messages_bytes += message->bytes;
	c->rx.message = message;
	c->rx.body = message->body;
	return ZP__ADMIT;
}

/* Frees a message that was received, in part or whole, and lets connections go on that waited for room. */
void zp__message_forget(zp_engine *engine, zp__message_in *message)
{
	engine->messages_bytes -= message->bytes;
	zp__list_remove(&message->node);
	buffer_give(engine, message, sizeof *message + message->bytes);
	ZP__EACH(node, &engine->parked)
	{
		zp__connection *c = ZP__ELEMENT(node, zp__connection, parked_node);
		if (c->rx.frame.kind == ZP__MESSAGE && zp__id_is_known(engine, c->rx.frame.id))
			zp__unpark(c);
	}
}

void zp__message_landed(zp__connection *c)
{
	zp_engine *engine = c->link->engine;
	zp__message_in *message = c->rx.message;
	c->rx.message = NULL;
	zp__channel *channel = channel_find(engine, c->rx.frame.id);
	if (!channel) { /* Closed while the message came. */
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

static void room_tell(zp__link *link)
{
	if (!link->open || link->room_bytes == UINT64_MAX || link->message_bytes > link->room_bytes)
		return;
	link->room_bytes = UINT64_MAX;
	ZP__EACH(node, &link->engine->channels)
	{
		zp__channel *channel = ZP__ELEMENT(node, zp__channel, node);
		if (!channel->waits)
			continue;
		channel->waits = false;
		channel->room.event = (zp_event){.kind = ZP_EVENT_ROOM, .id = channel->id};
		if (zp__list_empty(&channel->room.node)) /* Else the one before has not been polled: it is enough. */
			zp__event_push(channel->queue, &channel->room);
	}
}

/* It has arrived, or was lost with its link. */
void zp__message_sent(zp__link *link, zp__message_out *message)
{
	link->message_bytes -= message->bytes;
	buffer_give(link->engine, message, sizeof *message + message->bytes);
	room_tell(link);
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

/* A message with room for a body of so many bytes, or NULL; in `memory`, of buffer_take(), unless that is NULL. */
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
	link->message_bytes += message->bytes;
	zp__link_offer(link, &link->messages, &message->node);
}

/* Lock held. 0: `*link` is the link to `peer`, and has room for `bytes`. -EAGAIN: it has none, and the channel will be told
 * when it has. */
static int room_find(zp_engine *engine, const uint8_t peer[], uint64_t id, uint64_t bytes, uint64_t bytes_max,
		     zp__link **link)
{
	zp__channel *channel = channel_find(engine, id);
	if (!channel)
		return -ECANCELED;
	*link = zp__link_find(engine, peer);
	if (!*link)
		return -ENOTCONN;
	uint64_t beside = bytes < bytes_max ? bytes_max - bytes : 0; /* Bytes that may be there beside this message. */
	if ((*link)->message_bytes <= beside)
		return 0;
	(*link)->room_bytes = beside < bytes_max / 2 ? beside : bytes_max / 2;
	channel->waits = true;
	return -EAGAIN;
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
	pthread_mutex_lock(&engine->mutex); /* Once before, lest it be copied in vain, */
	int rc = room_find(engine, peer, channel, bytes, bytes_max, &link);
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
	message->crc = zp__crc32c(0, message->body, bytes);

	pthread_mutex_lock(&engine->mutex); /* and once after, as others may have been faster. */
	rc = room_find(engine, peer, channel, bytes, bytes_max, &link);
	if (rc == 0)
		message_offer(link, message);
	pthread_mutex_unlock(&engine->mutex);
	if (rc < 0)
		free(message);
	return rc;
}
