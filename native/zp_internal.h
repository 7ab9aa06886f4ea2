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
 *   tx.settles is looked at and cleared under the lock only.
 * - A connection that is closed leaves its place in the link, and its number there, to the next one: the places of a
 *   link are there for as long as it is, and those that are empty have no fd.
 * - A link lives until its last reference is gone: the table of links, each open connection, each attempt, each event
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
#include "seal.h"
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
#define ZP__RECEIVE_BYTES (256u << 10) /* a body is received, and then checksummed, in pieces that the L2 cache holds */
#define ZP__PIECE_BYTES (16u << 10)    /* a landed frame is worked on in pieces that the L1 cache holds */
#define ZP__POOL_REGIONS_MAX 16u
#define ZP__BUFFER_BYTES ((1u << 20) + (8u << 10)) /* of a message with a block of state, all included */
#define ZP__BUFFER_BYTES_MIN (256u << 10)	     /* smaller messages are allocated as they come */
#define ZP__BUFFERS_SPARE_MAX 48u
#define ZP__POOL_IDLE_NS ((uint64_t)5000000000) /* memory that no attempt used for so long is offered to the system */
#define ZP__POOL_KEEP_NS ((uint64_t)600000000000) /* and after this it is the system's */
#define ZP__DIRECT_WINDOW_BYTES (24u << 20)
#define ZP__DIRECT_WINDOW_SLOTS 8u /* at least, but for blocks of a few elements */
#define ZP__RECORD_TEXT_BYTES (32u << 10) /* of one record of a sealed connection */
#define ZP__SEAL_RECORDS 4u		  /* that a sealed connection buffers, in each direction */
/* An attempt whose frames were sent again so often, for each slot and beyond that, fails, and a link whose message was
 * sent again so often is lost: a peer that ends one connection after the other must not keep it busy for ever. */
#define ZP__RESENDS_PER_SLOT_MAX 16u
#define ZP__RESENDS_MIN 256u
#define ZP__MESSAGE_RESENDS_MAX 64u

typedef struct zp__algorithm zp__algorithm;
typedef struct zp__attempt zp__attempt;
typedef struct zp__connection zp__connection;
typedef struct zp__link zp__link;
typedef struct zp__thread zp__thread;

/* Memory for one attempt; later, perhaps, for another one. */
typedef struct {
	uint8_t *memory; /* NULL: none */
	size_t bytes;
	uint64_t idle_ns; /* in the pool: since when */
	bool offered;	  /* in the pool: the system may take the memory, and leave zeroed one in its place */
} zp__region;

/* Regions that no attempt uses, longest idle first. Touching new memory costs more than using it. */
typedef struct {
	zp__region regions[ZP__POOL_REGIONS_MAX];
	uint32_t count;
	size_t idle_bytes, used_bytes;
	size_t used_bytes_peak; /* since the pool was last trimmed; idle and used ones together never exceed it */
} zp__pool;

/* Memory of a message that is gone, for the next one: mapping it anew costs more than filling it. */
typedef struct {
	zp__list node; /* in engine->buffers, longest idle first */
	uint64_t idle_ns;
} zp__buffer;

/* An event that waits to be polled. Part of the thing it tells of, so that telling allocates nothing. */
typedef struct {
	zp__list node; /* in a queue, or alone */
	zp_event event;
} zp__event;

typedef struct {
	zp__list events;
	int fd; /* an eventfd that is written when the first event comes */
} zp__queue;

typedef struct {
	zp__event event;
	zp__list node;	/* in engine->messages from admission to release */
	uint64_t bytes; /* of body */
	uint8_t body[];
} zp__message_in;

typedef struct {
	zp__list node;	   /* in its link's flow, queued or sent */
	uint64_t sequence; /* once sent: place among the frames of its connection, from 1 on */
	uint32_t resent;   /* times */
	uint64_t channel;
	uint32_t bytes;
	uint32_t crc;
	uint8_t body[];
} zp__message_out;

typedef struct {
	zp__list node; /* in engine->channels */
	uint64_t id;
	zp__queue *queue; /* `own`, or the engine's; constant */
	zp__queue own;
	bool waits; /* zp_message_post() found no room since the last ROOM */
	zp__event room;
} zp__channel;

/* Frames of one attempt, or messages of one link, first in first out. The flows of a link take turns. */
typedef struct {
	zp__list node;	      /* in link->flows while `frames` is not empty, or alone */
	zp__list open_node;   /* in link->open_flows from zp__flow_open() to zp__flow_close() */
	zp__list frames;      /* of zp__slot.node or zp__message_out.node */
	zp__attempt *attempt; /* NULL: messages */
	/* For each connection: those that it has sent, in order, and that may have to be sent again (settle.c). */
	zp__list sent[ZP_LINK_CONNECTIONS_MAX];
} zp__flow;

enum {
	ZP__SLOT_REDUCED = 1, /* the reduce-scatter frame came (or none comes here) and our share is in it */
	ZP__SLOT_SENT = 2,    /* the reduce-scatter frame is sent (or none is sent from here) */
	ZP__SLOT_LANDING = 4, /* the all-gather frame is arriving, or the owner's result is there */
	ZP__SLOT_RESULT = 8,  /* the result is in the output */
	ZP__SLOT_SAVED = 16,  /* the old bytes of the output are in the workspace */
	ZP__SLOT_ARRIVING = 32 /* the reduce-scatter frame is arriving */
};
/* In the direct exchange, of a slot of another's chunk: REDUCED, our share may leave; SENT, it has left. Of a copy: REDUCED,
 * the result may leave to the neighbour; SENT, it has left. */

/* A peer that an attempt sends frames to or gets them from. */
typedef struct {
	zp__link *link;
	zp__flow flow; /* to it */
} zp__neighbour;

/* One frame's place in the tensor, and the frame that is queued for it: of the two that may leave from one place, the
 * first is always sent before the second can exist. */
typedef struct {
	zp__list node;	   /* in attempt->flow while it is queued, or sent and perhaps to be sent again; or alone */
	uint64_t sequence; /* once sent: place among the frames of its connection, from 1 on */
	uint32_t crc;	   /* of the body to send */
	uint8_t flags;
	uint8_t kind;	  /* to send: enum zp__frame_kind */
	uint16_t missing; /* direct, our own chunk: shares that have not landed */
} zp__slot;

/* Where a frame of a reduce lands and leaves from. */
enum zp__mode {
	ZP__OUT_OF_PLACE,     /* partial sums in the output; the input is only read */
	ZP__IN_PLACE_RESTORE, /* as the next, and the old bytes go to the workspace before */
	ZP__IN_PLACE,	      /* partial sums in the output, over the input; frames land in a buffer of the connection */
	ZP__SCATTER	      /* partial sums in the workspace, those of our own part in the output, which is no more */
};

struct zp__attempt {
	zp__list node; /* in a bucket of engine->attempts */
	zp_engine *engine;
	const zp__algorithm *algorithm;
	zp_reduce_plan plan; /* but for `peers` */
	zp__layout layout;
	enum zp__mode mode;
	bool quantised;
	zp__neighbour *neighbours; /* a ring: next and previous. direct: all others in order of rank */
	uint32_t neighbour_count;
	zp__link *next, *previous; /* of a ring; the same where world_size is 2 */
	zp__flow *flow;		   /* of a ring: to `next` */
	zp__slot *slots;
	uint32_t *owners;     /* of the layout. All-reduce: NULL */
	zp__region workspace; /* in place with restore, and scatter of three or more: size of the tensor */
	zp__slot *copies; /* direct: a slot of our own chunk and a neighbour: its share, and the result for it. Else NULL */
	uint64_t window;  /* direct: slots of a chunk that are on their way at a time */
	zp__region shares; /* direct: where shares of our own chunk land, `window` slots of all neighbours */
	zp__region wire;   /* quantised: layout.wire_stride bytes a slot (direct: a slot of the window) */
	uint64_t rx_remaining, tx_remaining; /* frames */
	uint64_t resent_frames;
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
	zp__flow *flow;		  /* that the frame is of; NULL: it is not sent again if the connection is lost */
	zp__connection *settles; /* whose SETTLE this is */
	uint8_t *aside; /* copy of the body of a frame whose attempt has ended; body points into it */
	bool active;
} zp__transmit;

/* A frame without a body that tells of a connection; part of that connection. */
typedef struct {
	zp__list node;		    /* in link->control while it is queued; see zp__settling */
	zp__connection *connection; /* that it tells of; constant */
	uint8_t kind;		    /* ZP__SETTLE or ZP__CONFIRM; constant */
	bool queued;
	uint32_t generation;
	uint64_t frames; /* received; of a CONFIRM it is looked up when it leaves */
} zp__control;

/* What is known of the frames of a connection, and of how it is settled once it is lost. Belongs to settle.c. */
typedef struct {
	uint32_t generation;	   /* of the connection that is, or was last, in this place */
	uint32_t generation_spent; /* of connections that only the other end has had here; or less */
	uint64_t tx_frames, rx_frames; /* wholly sent and received on this connection */
	uint64_t confirmed;	   /* frames sent that the other end said it has got */
	bool closed;		   /* here, and not yet settled */
	bool told;		   /* the other end has closed it and has got `told_frames` */
	uint64_t told_frames;
	bool has_messages; /* messages came on it: the other end waits for them to be confirmed */
	zp__control settle;  /* ours of this connection: queued, or in `carried` of the connection that sent it, or alone */
	zp__control confirm; /* queued or alone */
	zp__list carried;    /* SETTLEs of other connections that were sent on this one */
	zp__event event;     /* CONNECTION_LOST; holds a reference of the link while it waits */
} zp__settling;

struct zp__connection {
	zp__link *link;	    /* constant */
	zp__thread *thread; /* constant while it is open */
	uint32_t index;	    /* in the link; constant */
	int fd;		    /* -1: closed */
	zp__seal *seal;	    /* NULL: not sealed. What it holds is of the thread */
	/* Of its thread. */
	zp__list run_node;
	bool watched; /* is in the thread's epoll */
	bool readable, writable, hung_up;
	zp__receive rx;
	zp__transmit tx;
	uint8_t *landing; /* where frames land that have no place of their own; made when the first comes */
	size_t landing_bytes;
	/* Under the lock. */
	zp__list attention_node; /* in thread->attention: its thread must look at it */
	zp__list idle_node;	 /* in link->idle: writable, and no frame to send */
	zp__list parked_node;	 /* in engine->parked: its next frame may not land yet */
	bool closing;
	int lost_status; /* why it is closing, where the link goes on */
	zp__settling settling;
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
	bool sealed;	     /* all its connections are, or none; constant */
	zp__list control;    /* SETTLE and CONFIRM to send, before all else */
	zp__list open_flows; /* all */
	zp__list flows;	     /* those with frames to send, in turn */
	zp__list idle;	/* connections that wait for a frame, longest first */
	zp__flow messages;
	uint64_t message_bytes; /* queued, being sent, and not confirmed */
	uint64_t room_bytes;	/* ROOM is told when message_bytes is no more than this; UINT64_MAX: nobody waits for it */
	uint64_t resent_frames;
	uint32_t lost_count;
	bool local;		/* within this host; constant */
	uint32_t senders_max;	/* so many connections, the first that are open, take frames; constant */
	zp__event event;
	uint32_t connection_count; /* places; constant */
	zp__connection connections[ZP_LINK_CONNECTIONS_MAX];
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
	zp__queue queue;
	uint32_t thread_count;
	pthread_mutex_t mutex;
	pthread_cond_t unpinned; /* an ending attempt has no pins left, or is gone */
	bool stopping;		 /* threads must end */
	uint64_t id_known_max;
	uint64_t link_id_last;
	uint64_t links_check_ns; /* when the links are looked at next */
	zp__list links, channels, parked, messages;
	zp__list attempts[ZP__ATTEMPT_BUCKETS];
	uint32_t attempt_count;
	zp__list buffers;
	uint32_t buffer_count;	 /* in `buffers` */
	uint64_t messages_bytes; /* received or being received, not released */
	zp__pool pool;
	zp__list registry_node;	 /* in the process's list of engines */
	zp__thread threads[];
};

/* sock.c */
int zp__sock_prepare(int fd, uint32_t path_timeout_ms);
bool zp__sock_is_local(int fd);
uint64_t zp__sock_silence_ms(int fd);
ssize_t zp__sock_send(int fd, struct iovec *iov, int count);
ssize_t zp__sock_receive(int fd, struct iovec *iov, int count);
bool zp__sock_has_unsent(int fd);
int zp__eventfd_open(void);
void zp__eventfd_signal(int fd);
void zp__eventfd_drain(int fd);
uint64_t zp__now_ns(void);

/* memory.c */
void *zp__memory_map(size_t bytes);
void zp__memory_unmap(void *memory, size_t bytes);
int zp__region_take(zp_engine *engine, size_t bytes, zp__region *region);
void zp__region_give(zp_engine *engine, zp__region *region);
uint64_t zp__pool_trim(zp_engine *engine, uint64_t now_ns); /* the next deadline, or UINT64_MAX */
void zp__pool_discard(zp_engine *engine);
void zp__copy_past_cache(void *to, const void *from, size_t bytes);
void zp__copy_past_cache_done(void);

/* engine.c */
void zp__event_push(zp__queue *queue, zp__event *event); /* lock held */
void zp__event_withdraw(zp_engine *engine, zp__event *event); /* lock held */
void zp__id_told(zp_engine *engine, uint64_t id); /* lock held */
bool zp__id_is_known(const zp_engine *engine, uint64_t id); /* lock held */

/* loop.c */
int zp__thread_start(zp__thread *thread, zp_engine *engine, uint32_t index);
void zp__thread_wake(zp__thread *thread);			/* lock held */
void zp__connection_attend(zp__connection *connection);		/* lock held */

/* link.c */
void zp__link_release(zp__link *link);					/* lock held */
void zp__link_lose(zp__link *link, int status, bool tell);		/* lock held */
void zp__connection_lose(zp__connection *connection, int status);	/* lock held */
void zp__link_offer(zp__link *link, zp__flow *flow, zp__list *frame);	/* lock held */
void zp__link_wake_idle(zp__link *link);				/* lock held */
void zp__flow_open(zp__flow *flow, zp__link *link, zp__attempt *attempt); /* lock held, or the link is new */
void zp__flow_close(zp__flow *flow);					/* lock held */
void zp__link_retract(zp__flow *flow);					/* lock held */
zp__link *zp__link_find(zp_engine *engine, const uint8_t peer[]);	/* lock held */
bool zp__connection_may_send(const zp__connection *connection);		/* lock held */
void zp__connection_close(zp__connection *connection);			/* lock held */
uint64_t zp__links_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__unpark(zp__connection *connection);				/* lock held */

/* receive.c, send.c: one turn of a connection, by its thread. 1: call again; 0: nothing to do for now; -errno. */
int zp__receive_turn(zp__connection *connection);
int zp__send_turn(zp__connection *connection);

enum zp__verdict { ZP__ADMIT, ZP__PARK, ZP__DROP, ZP__VIOLATION, ZP__NO_MEMORY };

/* settle.c: what a lost connection has delivered. All: lock held. */
void zp__settle_init(zp__connection *connection);
int zp__settle_may_add(const zp__connection *connection, uint32_t generation);
void zp__settle_added(zp__connection *connection, uint32_t generation);
bool zp__settle_take(zp__connection *connection);
void zp__settle_sent(zp__connection *connection);
void zp__settle_received(zp__connection *connection);
enum zp__verdict zp__settle_admit(zp__connection *connection); /* never ZP__ADMIT */
void zp__settle_closed(zp__connection *connection);
void zp__settle_discard(zp__link *link);

/* message.c */
enum zp__verdict zp__message_admit(zp__connection *connection);	     /* lock held */
void zp__message_landed(zp__connection *connection);		     /* lock held */
void zp__message_sent(zp__link *link, zp__message_out *message);     /* lock held */
void zp__message_forget(zp_engine *engine, zp__message_in *message); /* lock held */
void zp__message_flow_clear(zp__link *link);			     /* lock held */
uint64_t zp__buffers_trim(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__buffers_discard(zp_engine *engine);

/* attempt.c */
zp__attempt *zp__attempt_find(zp_engine *engine, uint64_t id);		       /* lock held */
void zp__attempt_fail(zp__attempt *attempt, int status, const uint8_t *fault); /* lock held */
void zp__attempt_progress(zp__attempt *attempt);			       /* lock held */
enum zp__verdict zp__attempt_admit(zp__connection *connection);		       /* lock held; ZP__ADMIT: pinned */
void zp__attempt_unpin(zp_engine *engine, zp__attempt *attempt);	       /* lock held */
void zp__attempts_fail(zp__link *link, int status);			       /* lock held */
uint64_t zp__attempts_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__attempts_discard(zp_engine *engine);			 /* the threads have ended */

/* What the algorithms do with an attempt. */
struct zp__algorithm {
	int (*allocate)(zp__attempt *attempt); /* memory of its own; nobody knows the attempt yet */
	void (*start)(zp__attempt *attempt);   /* lock held; counts the frames and queues the first */
	/* Lock held. ZP__ADMIT: sets rx.slot and rx.body; make_room() sets a body that is NULL. */
	enum zp__verdict (*admit)(zp__attempt *attempt, zp__connection *connection);
	int (*make_room)(zp__connection *connection);	    /* pinned; before an admitted body is received. -ENOMEM */
	void (*landed)(zp__connection *connection);	    /* pinned; a frame is complete and its CRC is right */
	void (*prepare)(zp__connection *connection);	    /* pinned; makes header and body of the frame in c->tx */
	void (*sent)(zp__attempt *attempt, zp__slot *slot); /* lock held */
	void (*unsent)(zp__attempt *attempt, zp__slot *slot); /* lock held; it did not arrive and is to be sent again */
	void (*cut)(zp__connection *connection); /* lock held; the rest of an admitted frame will not come here */
};

extern const zp__algorithm zp__ring;   /* ring.c */
extern const zp__algorithm zp__direct; /* direct.c */

#endif
