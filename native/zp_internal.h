/* What the files of the engine share: structures and the functions between them. Everything here is `zp__`.
 *
 * Locking. There is one mutex, engine->mutex ("the lock"). It protects every field of every structure below that is not
 * said to be constant or to belong to one thread. It is held for bookkeeping only: recv, send, CRC, reduce, quantise
 * and restore run without it. An I/O thread that is about to touch the memory of an attempt without the lock pins the
 * attempt (attempt->pins, under the lock) and unpins it afterwards; whoever ends an attempt marks it as ending, waits
 * for pins == 0 and then detaches it from the connections. No other lock is ever taken while the lock is held.
 *
 * Ownership.
 * - A connection's fd is read, written and closed by its thread only. It is closed with the lock held, so that others
 *   may call shutdown() or ioctl() on it under the lock.
 * - connection->rx and ->tx belong to the connection's thread. As an exception, zp_reduce_end() detaches an attempt
 *   from them, under the lock and with the attempt's pins at 0; therefore the thread looks at the fields that name an
 *   attempt's memory (stage, attempt, body, length) under the lock, and keeps copies only while it holds a pin.
 * - A link lives until its last reference is gone: the table of links, each open connection, each attempt, an event
 *   that was not polled, a sender that waits.
 * Functions marked "lock held" expect the lock and leave it held. */
#ifndef ZP_INTERNAL_H
#define ZP_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "layout.h"
#include "list.h"
#include "zp_api.h"

struct iovec;

#define ZP__THREADS_MAX 16u
#define ZP__FRAME_BYTES_MIN 64u
#define ZP__FRAME_BYTES_MAX (16u << 20)
#define ZP__SLOTS_MAX (1u << 24)
#define ZP__WORLD_SIZE_MAX 1024u
#define ZP__ELEMENTS_MAX ((uint64_t)1 << 40)
#define ZP__ATTEMPT_BUCKETS 64u
#define ZP__SCRATCH_BYTES (64u << 10)

typedef struct zp__attempt zp__attempt;
typedef struct zp__connection zp__connection;
typedef struct zp__link zp__link;
typedef struct zp__thread zp__thread;

/* An event that waits to be polled. Part of the thing it tells of, so that telling allocates nothing. */
typedef struct {
	zp__list node; /* in engine->events, or alone */
	zp_event event;
} zp__event;

typedef struct {
	zp__event event;
	zp__list node;	/* in engine->messages from admission to release */
	uint64_t bytes; /* of body */
	uint8_t body[];
} zp__message_in;

typedef struct {
	zp__list node; /* in its link's flow */
	uint64_t channel;
	uint32_t bytes;
	uint32_t crc;
	uint8_t body[];
} zp__message_out;

typedef struct {
	zp__list node; /* in engine->channels */
	uint64_t id;
} zp__channel;

/* Frames of one attempt, or messages of one link, first in first out. The flows of a link take turns. */
typedef struct {
	zp__list node;	      /* in link->flows while `frames` is not empty, or alone */
	zp__list frames;      /* of zp__slot.node or zp__message_out.node */
	zp__attempt *attempt; /* NULL: messages */
} zp__flow;

enum {
	ZP__SLOT_REDUCED = 1, /* the reduce-scatter frame came (or none comes here) and our share is in it */
	ZP__SLOT_SENT = 2,    /* the reduce-scatter frame is sent (or none is sent from here) */
	ZP__SLOT_LANDING = 4, /* the all-gather frame is arriving, or the owner's result is there */
	ZP__SLOT_RESULT = 8,  /* the result is in the output */
	ZP__SLOT_SAVED = 16,  /* the old bytes of the output are in the workspace */
	ZP__SLOT_ARRIVING = 32 /* the reduce-scatter frame is arriving */
};

/* One frame's place in the tensor, and the frame that is queued for it: of the two that may leave from one place, the
 * first is always sent before the second can exist. */
typedef struct {
	zp__list node; /* in attempt->flow while it is queued, or alone */
	uint32_t crc;  /* of the body to send */
	uint8_t flags;
	uint8_t kind; /* to send: enum zp__frame_kind */
} zp__slot;

/* Where a frame of a reduce lands and leaves from. */
enum zp__mode {
	ZP__OUT_OF_PLACE,     /* partial sums in the output; the input is only read */
	ZP__IN_PLACE_RESTORE, /* partial sums in the workspace, later the old bytes of the output */
	ZP__IN_PLACE	      /* partial sums in the output, over the input; frames land in one buffer a connection */
};

struct zp__attempt {
	zp__list node; /* in a bucket of engine->attempts */
	zp_reduce_plan plan;
	zp__layout layout;
	enum zp__mode mode;
	bool quantised;
	zp__link *next, *previous;
	zp__flow flow; /* to `next` */
	zp__slot *slots;
	uint8_t *workspace; /* in place with restore: size of the tensor. Else NULL */
	size_t workspace_bytes;
	uint8_t *wire; /* quantised: layout.wire_stride bytes a slot. Else NULL */
	size_t wire_bytes;
	uint8_t *landing; /* in place without restore, not quantised: one frame a connection of `previous`. Else NULL */
	size_t landing_bytes;
	uint64_t rx_remaining, tx_remaining; /* frames */
	uint64_t digest;
	uint64_t tx_bytes, rx_bytes;
	uint64_t moved_ns; /* when the last byte moved */
	uint32_t pins;
	int status;   /* negative once it failed */
	bool done;    /* REDUCE_DONE was queued */
	bool ending;  /* zp_reduce_end() waits for the pins */
	zp__event event;
};

enum zp__rx_stage {
	ZP__RX_HEADER, /* a header is arriving */
	ZP__RX_ADMIT,  /* a header is complete; its frame has no place yet */
	ZP__RX_BODY,   /* the body is landing in `attempt` or `message` */
	ZP__RX_DRAIN   /* the body is read and forgotten */
};

typedef struct {
	zp__frame_parser parser;
	zp__frame frame;
	enum zp__rx_stage stage;
	uint8_t *body;
	uint32_t have; /* bytes of the body */
	uint32_t crc;
	zp__attempt *attempt;
	zp__slot *slot;
	zp__message_in *message;
} zp__receive;

typedef struct {
	uint8_t header[ZP__HEADER_BYTES];
	const uint8_t *body; /* NULL until the frame is prepared */
	uint32_t length;     /* of the body */
	uint64_t sent;	     /* bytes, header included */
	zp__attempt *attempt;
	zp__slot *slot;
	zp__message_out *message;
	uint8_t *aside; /* copy of the body of a frame whose attempt has ended; body points into it */
	bool active;
} zp__transmit;

struct zp__connection {
	zp__link *link;	    /* constant */
	zp__thread *thread; /* constant */
	uint32_t index;	    /* in the link; constant */
	int fd;		    /* -1 once closed */
	/* Of its thread. */
	zp__list run_node;
	bool watched; /* is in the thread's epoll */
	bool readable, writable, hung_up;
	zp__receive rx;
	zp__transmit tx;
	/* Under the lock. */
	zp__list attention_node; /* in thread->attention: its thread must look at it */
	zp__list idle_node;	 /* in link->idle: writable, and no frame to send */
	zp__list parked_node;	 /* in engine->parked: its next frame may not land yet */
	bool closing;
	uint64_t silent_ns; /* since when the other end owes acknowledgements and sends none; 0: it does not */
	uint64_t tx_bytes, rx_bytes;
};

struct zp__link {
	zp_engine *engine; /* constant */
	zp__list node;	   /* in engine->links while it is open */
	uint8_t peer[ZP_PEER_ID_BYTES];
	uint64_t id;
	uint32_t references;
	bool open;
	zp__list flows; /* those with frames to send, in turn */
	zp__list idle;	/* connections that wait for a frame, longest first */
	zp__flow messages;
	uint64_t message_bytes; /* queued and being sent */
	zp__event event;
	uint32_t connection_count;
	zp__connection connections[];
};

struct zp__thread {
	zp_engine *engine;
	pthread_t pthread;
	uint32_t index;
	bool started;
	int epoll_fd, wake_fd;
	zp__list run;	    /* connections with something to do; of the thread */
	zp__list attention; /* under the lock */
	bool woken;	    /* wake_fd was written since the thread last looked; under the lock */
	uint8_t *scratch;   /* ZP__SCRATCH_BYTES, for bodies that are dropped; of the thread */
};

struct zp_engine {
	zp_engine_config config; /* constant */
	int event_fd;
	uint32_t thread_count;
	uint32_t thread_next; /* gets the next connection */
	pthread_mutex_t mutex;
	pthread_cond_t unpinned; /* an ending attempt has no pins left, or is gone */
	pthread_cond_t room;	 /* a message left a send queue, a link was lost, or the engine shuts down */
	bool stopping;		 /* threads must end */
	bool shut_down;		 /* waiting calls must return */
	uint32_t waiting;	 /* calls in pthread_cond_wait */
	uint64_t id_known_max;
	uint64_t link_id_last;
	uint64_t links_check_ns; /* when the links are looked at next */
	zp__list links, channels, parked, events, messages;
	zp__list attempts[ZP__ATTEMPT_BUCKETS];
	uint32_t attempt_count;
	uint64_t messages_bytes; /* received or being received, not released */
	zp__list registry_node;	 /* in the process's list of engines */
	zp__thread threads[];
};

/* sock.c */
int zp__sock_prepare(int fd, uint32_t path_timeout_ms);
uint64_t zp__sock_silence_ms(int fd);
ssize_t zp__sock_send(int fd, struct iovec *iov, int count);
ssize_t zp__sock_receive(int fd, struct iovec *iov, int count);
bool zp__sock_has_unsent(int fd);
int zp__eventfd_open(void);
void zp__eventfd_signal(int fd);
void zp__eventfd_drain(int fd);
uint64_t zp__now_ns(void);
void *zp__memory_map(size_t bytes);
void zp__memory_unmap(void *memory, size_t bytes);

/* engine.c */
void zp__event_push(zp_engine *engine, zp__event *event); /* lock held */
void zp__event_withdraw(zp_engine *engine, zp__event *event); /* lock held */
void zp__id_told(zp_engine *engine, uint64_t id); /* lock held */

/* loop.c */
int zp__thread_start(zp__thread *thread, zp_engine *engine, uint32_t index);
void zp__thread_wake(zp__thread *thread);			/* lock held */
void zp__connection_attend(zp__connection *connection);		/* lock held */

/* link.c */
void zp__link_release(zp__link *link);					/* lock held */
void zp__link_lose(zp__link *link, int status, bool tell);		/* lock held */
void zp__link_offer(zp__link *link, zp__flow *flow, zp__list *frame);	/* lock held */
void zp__link_retract(zp__flow *flow);					/* lock held */
zp__link *zp__link_find(zp_engine *engine, const uint8_t peer[]);	/* lock held */
void zp__connection_close(zp__connection *connection);			/* lock held */
uint64_t zp__links_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__unpark(zp__connection *connection);				/* lock held */

/* receive.c, send.c: one turn of a connection, by its thread. 1: call again; 0: nothing to do for now; -errno. */
int zp__receive_turn(zp__connection *connection);
int zp__send_turn(zp__connection *connection);

enum zp__verdict { ZP__ADMIT, ZP__PARK, ZP__DROP, ZP__VIOLATION };

/* message.c */
enum zp__verdict zp__message_admit(zp__connection *connection);	     /* lock held */
void zp__message_landed(zp__connection *connection);		     /* lock held */
void zp__message_sent(zp__link *link, zp__message_out *message);     /* lock held */
void zp__message_forget(zp_engine *engine, zp__message_in *message); /* lock held */
void zp__message_flow_clear(zp__link *link);			     /* lock held */

/* attempt.c */
zp__attempt *zp__attempt_find(zp_engine *engine, uint64_t id);		       /* lock held */
void zp__attempt_fail(zp__attempt *attempt, int status, const uint8_t *fault); /* lock held */
void zp__attempt_progress(zp__attempt *attempt);			       /* lock held */
void zp__attempt_unpin(zp_engine *engine, zp__attempt *attempt);	       /* lock held */
void zp__attempts_fail(zp__link *link, int status);			       /* lock held */
uint64_t zp__attempts_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__attempts_discard(zp_engine *engine);			 /* the threads have ended */

/* ring.c */
void zp__ring_start(zp__attempt *attempt);				    /* lock held */
enum zp__verdict zp__ring_admit(zp__connection *connection);		    /* lock held; ZP__ADMIT: pinned */
void zp__ring_make_room(zp__connection *connection);			    /* pinned */
void zp__ring_landed(zp__connection *connection);			    /* pinned */
void zp__ring_prepare(zp__connection *connection);			    /* pinned */
void zp__ring_sent(zp__attempt *attempt, zp__slot *slot);		    /* lock held */
void zp__ring_restore(zp__attempt *attempt); /* no thread uses the attempt any more */

#endif
