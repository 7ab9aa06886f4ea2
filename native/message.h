/* Messages and channels; see message.c. */
#ifndef ZP_MESSAGE_H
#define ZP_MESSAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "event.h"
#include "link.h"
#include "list.h"
#include "zp_api.h"

/* Buffer of a released message, kept for the next one: mapping new memory costs more than filling it. */
typedef struct {
	zp__list node; /* in engine->buffers, longest idle first */
	uint64_t idle_ns;
} zp__buffer;

struct zp__message_in {
	zp__event event;
	zp__list node;	/* in engine->messages from admission to release */
	zp__link *link; /* the link that it comes from; a reference */
	uint64_t bytes; /* of body */
	uint64_t charged;
	zp__frame frame; /* header of a frame of an attempt that is not begun; event.node is in engine->early */
	uint64_t checksum; /* of that frame */
	uint8_t body[];
};

struct zp__message_out {
	zp__list node;	   /* in its link's flow, queued or sent */
	uint64_t sequence; /* once sent: number of the frame on its connection, from 1 */
	uint32_t resent;   /* number of retransmissions */
	uint64_t channel;
	uint32_t bytes;
	uint32_t checksum;
	uint8_t body[];
};

typedef struct {
	zp__list node; /* in engine->channels */
	uint64_t id;
	zp__queue *queue; /* `own`, or the engine's; constant */
	zp__queue own;
	bool waits; /* zp_message_post() found no room since the last WRITABLE */
	zp__event writable;
} zp__channel;

uint64_t zp__early_charge(uint64_t body_bytes); /* what an early frame costs the end that keeps it */

/* Lock held, or the threads have ended. */
enum zp__verdict zp__early_admit(zp__connection *connection);
enum zp__verdict zp__message_admit(zp__connection *connection);
void zp__message_landed(zp__connection *connection);
void zp__message_sent(zp__link *link, zp__message_out *message);
void zp__message_forget(zp_engine *engine, zp__message_in *message);
void zp__message_flow_clear(zp__link *link);
/* Queues a short message, unless there is no link to `peer`, no memory, or no room in the queue. */
void zp__message_send(zp_engine *engine, const uint8_t peer[], uint64_t channel, const void *body, size_t bytes);
uint64_t zp__buffers_trim(zp_engine *engine, uint64_t now_ns); /* the next deadline, or UINT64_MAX */

#endif
