/* The state of a connection that is needed to retransmit its frames once it is lost; see retransmit.c. */
#ifndef ZP_RETRANSMIT_H
#define ZP_RETRANSMIT_H

#include <stdbool.h>
#include <stdint.h>

#include "event.h"
#include "frame.h"
#include "list.h"

typedef struct zp__connection zp__connection;
typedef struct zp__link zp__link;

/* An acknowledgement of the frames of one connection; embedded in that connection. */
typedef struct {
	zp__list node;		    /* in link->control while it is queued; see zp__retransmit */
	zp__connection *connection; /* the one that it acknowledges; constant */
	uint8_t kind;		    /* ZP__FINAL_ACK or ZP__ACK; constant */
	uint32_t generation;
	uint64_t frames; /* FINAL_ACK: number of frames received. An ACK looks it up when it is sent */
} zp__control;

/* Frame counts of a connection, and the state of retransmission after it is lost. Owned by retransmit.c. */
typedef struct {
	uint32_t generation;	   /* of the open connection, or of the last one */
	uint32_t generation_spent; /* greatest generation that the other end has added and this end never has */
	uint64_t tx_frames, rx_frames; /* sent and received completely in this generation */
	uint64_t acknowledged;	   /* frames sent that the other end has acknowledged */
	bool closed;		   /* closed at this end; the other end's FINAL_ACK is missing */
	bool final_ack_received;   /* the other end has closed it, after it received `final_ack_frames` */
	uint64_t final_ack_frames;
	bool has_messages;     /* it has received messages, so the other end needs ACKs */
	zp__control final_ack; /* ours for this connection: queued, in `carried` of the connection that sent it, or in no list */
	zp__control ack;       /* queued, or in no list */
	zp__list carried;      /* FINAL_ACKs for other connections that were sent on this one */
	zp__event event;       /* CONNECTION_LOST; holds a reference to the link while it is queued */
} zp__retransmit;

/* retransmit.c. All: lock held. */
void zp__retransmit_init(zp__connection *connection);
int zp__retransmit_may_add(const zp__connection *connection, uint32_t generation);
void zp__retransmit_added(zp__connection *connection, uint32_t generation);
bool zp__retransmit_take(zp__connection *connection);
void zp__retransmit_sent(zp__connection *connection);
void zp__retransmit_received(zp__connection *connection);
enum zp__verdict zp__retransmit_admit(zp__connection *connection); /* never ZP__ADMIT */
void zp__retransmit_closed(zp__connection *connection);
void zp__retransmit_discard(zp__link *link);

#endif
