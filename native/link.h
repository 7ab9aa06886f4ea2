/* Links, their connections, and the frames that these receive and send; see link.c, receive.c, send.c.
 *
 * A connection's fd is read, written and closed by its thread only. It is closed with the lock held, so that others may
 * call shutdown() or ioctl() on it under the lock.
 *
 * connection->rx and ->tx belong to the connection's thread. As an exception, zp_reduce_end() detaches an attempt from
 * them, under the lock and with the attempt's pins at 0. Therefore the thread reads the fields that refer to an attempt's
 * memory (attempt, body, length) under the lock, and keeps copies only while it holds a pin. tx.final_ack_of is read and
 * cleared under the lock only.
 *
 * A zp__connection struct exists as long as its link. When its connection is closed, fd is -1 until zp_link_add() gives
 * it another one, at the same index.
 *
 * A link is freed with its last reference. References are held by the table of links, each open connection, each
 * attempt, each event that was not polled, and each message that was not released. */
#ifndef ZP_LINK_H
#define ZP_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "checksum.h"
#include "event.h"
#include "frame.h"
#include "list.h"
#include "record.h"
#include "retransmit.h"
#include "shm.h"
#include "zp_api.h"

typedef struct zp__attempt zp__attempt;
typedef struct zp__message_in zp__message_in;
typedef struct zp__message_out zp__message_out;
typedef struct zp__slot zp__slot;
typedef struct zp__thread zp__thread;

/* A queue of the frames of one attempt, or of the messages of one link. The flows of a link take turns. */
typedef struct {
	zp__list node;	      /* in link->flows while `frames` is not empty, otherwise in no list */
	zp__list open_node;   /* in link->open_flows from zp__flow_open() to zp__flow_close() */
	zp__list frames;      /* of zp__slot.node or zp__message_out.node */
	zp__attempt *attempt; /* NULL: messages */
	zp__list started_node; /* in link->started while its STARTED waits to be sent */
	bool announces;	      /* its STARTED waits to be sent, or was sent */
	bool begun;	      /* the other end has announced that it has begun the attempt */
	uint64_t eager_bytes; /* bytes sent before that */
	uint64_t due_ns, step_ns; /* its schedule: when the next frame may be sent, and how much later each further one.
				   * step_ns 0: at once (pace.c) */
	/* By connection: frames that it has sent, in order, and may have to retransmit (retransmit.c). */
	zp__list sent[ZP_LINK_CONNECTIONS_MAX];
} zp__flow;

enum zp__rx_stage {
	ZP__RX_HEADER, /* receiving a header */
	ZP__RX_ADMIT,  /* the header is complete; its frame is not admitted yet */
	ZP__RX_BODY,   /* receiving the body into `attempt` or `message` */
	ZP__RX_DRAIN   /* reading the body and dropping it */
};

/* A frame that is being received on a connection, or was kept and is replayed (early.c). */
typedef struct {
	zp__link *link; /* constant */
	zp__frame_parser parser;
	zp__frame frame;
	enum zp__rx_stage stage;
	uint8_t *body;
	uint8_t *landing; /* receives frames that cannot go straight to the tensor; allocated with the first one */
	size_t landing_bytes;
	uint32_t have; /* bytes of the body received so far */
	zp__checksum so_far; /* of the body */
	uint64_t checksum;   /* of the body, once it is complete */
	zp__attempt *attempt;
	zp__slot *slot;
	zp__message_in *message; /* written under the lock */
	uint64_t due_ns;	 /* of a message: if no byte comes until then, its link is lost. Under the lock */
} zp__receive;

typedef struct {
	uint8_t header[ZP__HEADER_BYTES];
	const uint8_t *body; /* NULL until the frame is prepared */
	uint32_t length;     /* of the body */
	uint64_t sent;	     /* bytes, header included */
	zp__attempt *attempt;
	zp__slot *slot;
	zp__message_out *message;
	zp__flow *flow; /* flow of the frame; NULL: it is not retransmitted if the connection is lost */
	zp__connection *final_ack_of; /* the frame is the FINAL_ACK of this connection; NULL: it is not a FINAL_ACK */
	uint8_t *aside; /* copy of the body of a frame whose attempt has ended; body points into it */
	bool active;
	bool sending; /* its thread prepares or sends a part of it now. Under the lock */
	bool awaited; /* a frame is parked until that is over. Under the lock */
} zp__transmit;

struct zp__connection {
	zp__link *link;	    /* constant */
	zp__thread *thread; /* constant while it is open */
	uint32_t index;	    /* in link->connections; constant */
	int fd;		    /* -1: closed */
	zp__shm *shm;		   /* NULL: its bytes go over the socket. Its contents are owned by the thread */
	zp__record_layer *records; /* NULL: not encrypted. Its contents are owned by the thread */
	/* Owned by its thread. */
	zp__list run_node;
	bool watched; /* by the thread's waiter */
	bool readable, writable, hung_up;
	zp__receive rx;
	zp__transmit tx;
	/* Under the lock. */
	zp__list attention_node; /* in thread->attention: its thread must handle it */
	zp__list idle_node;	 /* in link->idle: writable, and no frame to send */
	zp__list parked_node;	 /* in engine->parked: the body of its next frame may not be received yet */
	bool closing;
	int lost_status; /* why it is closing, if the link stays open */
	zp__retransmit retransmit;
	uint64_t silent_ns; /* time since which the other end has owed TCP acknowledgements; 0: it owes none */
	uint64_t tx_bytes, rx_bytes;
};

struct zp__link {
	zp_engine *engine; /* constant */
	zp__list node;	   /* in engine->links while it is open */
	uint8_t peer[ZP_PEER_ID_BYTES];
	uint64_t id;
	uint32_t references;
	bool open;
	bool encrypted;	     /* all its connections are, or none; constant */
	zp__list control;    /* acknowledgements to send; they go before all other frames */
	zp__list open_flows; /* all flows */
	zp__list flows;	     /* flows with frames to send; the first one is next */
	zp__list idle;	     /* connections that wait for a frame, longest first */
	zp__flow messages;
	zp__list started;	 /* flows of attempts whose STARTED is to be sent */
	uint64_t channel_max;	 /* the greatest channel that the other end has announced */
	uint64_t eager_bytes;	 /* of all flows */
	bool opened_queued;	 /* OPENED waits to be sent */
	bool withholds;		 /* frames wait, but none may be sent before the other end announces more, or time passes */
	uint64_t resume_ns;	 /* when the next frame is due of flows that had none to send; UINT64_MAX: none */
	uint64_t moved_bytes;	 /* of attempts, sent and received */
	uint64_t moved_frames;	 /* of attempts, sent and received completely */
	uint64_t moved_ns;	 /* when the last of them was complete */
	uint64_t received_bytes; /* charged for messages that are being received, or not released */
	uint64_t message_bytes;	 /* queued, being sent, or not acknowledged */
	uint64_t writable_bytes; /* WRITABLE is reported once message_bytes is at most this; UINT64_MAX: not wanted */
	uint32_t lost_count;
	bool local;	      /* both ends are on this host; constant */
	uint32_t senders_max; /* only the first senders_max open connections send frames */
	zp__event event;
	uint32_t connection_count; /* used length of `connections`; constant */
	zp__connection connections[ZP_LINK_CONNECTIONS_MAX];
};

/* link.c */
void zp__link_release(zp__link *link);					/* lock held */
void zp__link_lose(zp__link *link, int status, bool tell);		/* lock held */
void zp__connection_lose(zp__connection *connection, int status);	/* lock held */
void zp__link_offer(zp__link *link, zp__flow *flow, zp__list *frame);	/* lock held */
void zp__link_offer_before(zp__link *link, zp__flow *flow, zp__list *next, zp__list *frame); /* lock held */
bool zp__link_wake_idle(zp__link *link);				/* lock held */
void zp__link_wake_any(zp__link *link);					/* lock held */
void zp__link_look_again(zp__link *link);				/* lock held */
void zp__flow_open(zp__flow *flow, zp__link *link, zp__attempt *attempt); /* lock held, or the link is new */
void zp__flow_close(zp__link *link, zp__flow *flow);			/* lock held */
void zp__link_retract(zp__flow *flow);					/* lock held */
zp__link *zp__link_find(zp_engine *engine, const uint8_t peer[]);	/* lock held */
bool zp__connection_may_send(const zp__connection *connection);		/* lock held */
void zp__connection_close(zp__connection *connection);			/* lock held */
uint64_t zp__links_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__unpark(zp__connection *connection);				/* lock held */
void zp__unpark_all(zp_engine *engine);					/* lock held */

/* link.c: the bytes of a connection, with the conventions of sock.c; by its thread. */
ssize_t zp__connection_send(zp__connection *connection, struct iovec *iov, int count);
ssize_t zp__connection_receive(zp__connection *connection, struct iovec *iov, int count);

/* receive.c, send.c: one turn of a connection, by its thread. 1: call again; 0: nothing to do for now; -errno. */
int zp__receive_turn(zp__connection *connection);
int zp__send_turn(zp__connection *connection);

#endif
