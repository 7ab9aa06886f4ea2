/* What the files of the engine share: structures and the functions between them. Everything here is `zp__`.
 *
 * Locking. There is one mutex, engine->mutex ("the lock"). It protects every field of every structure below that is not
 * marked as constant or as owned by one thread. It is held for bookkeeping only: recv, send, checksums, reduce, quantise
 * and restore run without it. Before an I/O thread touches the memory of an attempt without the lock, it pins the
 * attempt (attempt->pins, under the lock); afterwards it unpins it. The thread that ends an attempt marks it as ending,
 * waits for pins == 0 and then detaches it from the connections. No other lock is taken while the lock is held.
 *
 * Ownership.
 * - A connection's fd is read, written and closed by its thread only. It is closed with the lock held, so that others
 *   may call shutdown() or ioctl() on it under the lock.
 * - connection->rx and ->tx belong to the connection's thread. As an exception, zp_reduce_end() detaches an attempt
 *   from them, under the lock and with the attempt's pins at 0. Therefore the thread reads the fields that refer to an
 *   attempt's memory (stage, attempt, body, length) under the lock, and keeps copies only while it holds a pin.
 *   tx.final_ack_of is read and cleared under the lock only.
 * - A zp__connection struct exists as long as its link. When its connection is closed, fd is -1 until zp_link_add() gives
 *   it another one, at the same index.
 * - A link is freed with its last reference. References are held by the table of links, each open connection, each
 *   attempt, each event that was not polled, and a waiting sender.
 * Functions marked "lock held" expect the lock and leave it held. */
#ifndef ZP_INTERNAL_H
#define ZP_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "checksum.h"
#include "frame.h"
#include "layout.h"
#include "list.h"
#include "record.h"
#include "zp_api.h"

#ifndef __linux__
#define ZP_POLL
#endif

struct iovec;
struct pollfd;

#define ZP__THREADS_MAX 16u
#define ZP__FRAME_BYTES_MIN 64u
#define ZP__FRAME_BYTES_MAX (16u << 20)
#define ZP__SLOTS_MAX (1u << 24)
#define ZP__WORLD_SIZE_MAX 2048u /* PEERS_MAX in limits.py */
#define ZP__ELEMENTS_MAX ((uint64_t)1 << 40)
#define ZP__ATTEMPT_BUCKETS 64u
#define ZP__SCRATCH_BYTES (64u << 10)
#define ZP__RECEIVE_BYTES (256u << 10) /* a body is received and checksummed in pieces that fit the L2 cache */
#define ZP__PIECE_BYTES (16u << 10)    /* a received frame is reduced in pieces that fit the L1 cache */
#define ZP__WIDE_PIECE_BYTES (4u << 10) /* of elements that are made wide, up to four times as large */
#define ZP__RATE_MIN (16u << 10)  /* bytes per second that attempts must move on average while no frame is complete */
#define ZP__EAGER_BYTES (4u << 20) /* of larger tensors that a link sends before it is known that they have begun (early.c) */
#define ZP__EAGER_TENSOR_BYTES (256u << 10) /* up to this, a tensor is sent without waiting for that */
#define ZP__TURN_FRAMES 1024u	  /* of other attempts that may pass before one that waits for its turn has stalled */
#define ZP__POOL_REGIONS_MAX 16u
#define ZP__BUFFER_BYTES ((1u << 20) + (8u << 10)) /* fits a message with one block of state */
#define ZP__BUFFER_BYTES_MIN (256u << 10)	     /* smaller messages come from the heap */
#define ZP__BUFFERS_SPARE_MAX 48u
#define ZP__POOL_IDLE_NS ((uint64_t)5000000000)	  /* after this, idle memory is offered to the kernel (MADV_FREE) */
#define ZP__POOL_KEEP_NS ((uint64_t)600000000000) /* after this, idle memory is unmapped */
#define ZP__DIRECT_WINDOW_BYTES (24u << 20)
#define ZP__DIRECT_WINDOW_SLOTS 8u /* minimum, except where a quantisation block is larger than the frame allows */
#define ZP__RECORD_PLAINTEXT_BYTES (32u << 10) /* maximum of one record of an encrypted connection */
#define ZP__RECORDS_BUFFERED 4u /* records that an encrypted connection buffers in each direction */
/* Bounds on retransmission: of an attempt, RESENDS_MIN frames plus RESENDS_PER_SLOT_MAX for each slot, then it fails; of
 * a message MESSAGE_RESENDS_MAX times, then its link is lost. Otherwise a peer that closes one connection after another
 * would keep the engine busy for ever. */
#define ZP__RESENDS_PER_SLOT_MAX 16u
#define ZP__RESENDS_MIN 256u
#define ZP__MESSAGE_RESENDS_MAX 64u

typedef struct zp__algorithm zp__algorithm;
typedef struct zp__attempt zp__attempt;
typedef struct zp__connection zp__connection;
typedef struct zp__link zp__link;
typedef struct zp__thread zp__thread;

/* Mapped memory of one attempt; the pool reuses it. */
typedef struct {
	uint8_t *memory; /* NULL: none */
	size_t bytes;
	uint64_t idle_ns; /* in the pool: time since which it is idle */
	bool offered;	  /* in the pool: the kernel may reclaim its pages, which then read as zeros */
} zp__region;

/* Regions that no attempt uses, longest idle first. Page faults of new memory would cost more than the reduction. */
typedef struct {
	zp__region regions[ZP__POOL_REGIONS_MAX];
	uint32_t count;
	size_t idle_bytes, used_bytes;
	size_t used_bytes_peak; /* since the pool was last trimmed; bounds idle_bytes + used_bytes */
} zp__pool;

/* Buffer of a released message, kept for the next one: mapping new memory costs more than filling it. */
typedef struct {
	zp__list node; /* in engine->buffers, longest idle first */
	uint64_t idle_ns;
} zp__buffer;

/* Makes a descriptor readable. -1: none. */
typedef struct {
	int read_fd, write_fd; /* the ends of a pipe, or twice an eventfd */
} zp__wakeup;

/* See wait.c. */
typedef struct {
	zp__wakeup wakeup;
#ifdef ZP_POLL
	zp__connection **connections;
	struct pollfd *fds; /* of the wakeup and the connections */
	uint32_t count, capacity;
#else
	int epoll_fd;
#endif
} zp__waiter;

/* An event that waits to be polled. It is embedded in its subject, so that queueing it allocates nothing. */
typedef struct {
	zp__list node; /* in a queue, or in no list */
	zp_event event;
} zp__event;

typedef struct {
	zp__list events;   /* other than messages; they are polled first, so no peer can delay them with messages */
	zp__list messages; /* MESSAGE events */
	int fd;		   /* a wakeup's write_fd, which is signalled when the first event comes */
} zp__queue;

typedef struct {
	zp__event event;
	zp__list node;	/* in engine->messages from admission to release */
	zp__link *link; /* from which it comes; a reference */
	uint64_t bytes; /* of body */
	zp__frame frame; /* of an attempt that is not begun: its header; event.node is in engine->early */
	uint64_t checksum; /* of that */
	uint8_t body[];
} zp__message_in;

typedef struct {
	zp__list node;	   /* in its link's flow, queued or sent */
	uint64_t sequence; /* once sent: number of the frame on its connection, from 1 */
	uint32_t resent;   /* number of retransmissions */
	uint64_t channel;
	uint32_t bytes;
	uint32_t checksum;
	uint8_t body[];
} zp__message_out;

typedef struct {
	zp__list node; /* in engine->channels */
	uint64_t id;
	zp__queue *queue; /* `own`, or the engine's; constant */
	zp__queue own;
	bool waits; /* zp_message_post() found no room since the last ROOM */
	zp__event writable;
} zp__channel;

/* A FIFO queue of the frames of one attempt, or of the messages of one link. The flows of a link take turns. */
typedef struct {
	zp__list node;	      /* in link->flows while `frames` is not empty, else in no list */
	zp__list open_node;   /* in link->open_flows from zp__flow_open() to zp__flow_close() */
	zp__list frames;      /* of zp__slot.node or zp__message_out.node */
	zp__attempt *attempt; /* NULL: messages */
	uint64_t eager_bytes; /* sent before it is known that the attempt has begun */
	/* By connection: frames that it has sent, in order, and that may have to be retransmitted (retransmit.c). */
	zp__list sent[ZP_LINK_CONNECTIONS_MAX];
} zp__flow;

enum {
	ZP__SLOT_REDUCED = 1, /* the reduce-scatter frame was received (or none comes here) and our share is added */
	ZP__SLOT_SENT = 2,    /* the reduce-scatter frame was sent (or none is sent from here) */
	ZP__SLOT_LANDING = 4, /* the all-gather frame is being received, or this peer owns the result and has it */
	ZP__SLOT_RESULT = 8,  /* the result is in the output */
	ZP__SLOT_SAVED = 16,  /* the old bytes of the output are in the workspace */
	ZP__SLOT_ARRIVING = 32 /* the reduce-scatter frame is being received */
};
/* In the direct exchange two flags mean something else. In a slot of another peer's chunk: REDUCED, our share may be
 * sent; SENT, it was sent. In a copy: REDUCED, the result may be sent to the neighbour; SENT, it was sent. */

/* A peer that an attempt sends frames to or gets them from. */
typedef struct {
	zp__link *link;
	zp__flow flow; /* to it */
} zp__neighbour;

/* The span of the tensor that one frame carries, and the frame that is queued for it. Two frames may be sent for one
 * slot (reduce-scatter, then all-gather); the first is always sent before the second exists. For exchange.c see there. */
typedef struct {
	zp__list node;	   /* in the flow while it is queued, or sent and not known to have arrived; else in no list */
	uint64_t sequence; /* once sent: number of the frame on its connection, from 1 */
	uint32_t checksum; /* of the body to send: the lower half */
	uint8_t flags;
	uint8_t kind;	  /* to send: enum zp__frame_kind */
	uint16_t missing; /* direct, our own chunk: shares that are still to be received */
} zp__slot;

/* Where the partial sums of a reduction are. */
enum zp__mode {
	ZP__OUT_OF_PLACE,     /* in the output; the input is only read */
	ZP__IN_PLACE_RESTORE, /* as IN_PLACE; the old bytes are saved to the workspace first */
	ZP__IN_PLACE,	      /* in the output, over the input; frames are received to a buffer of the connection */
	ZP__SCATTER	      /* in the workspace; only those of our own part in the output */
};

struct zp__attempt {
	zp__list node; /* in a bucket of engine->attempts */
	zp_engine *engine;
	const zp__algorithm *algorithm;
	zp_reduce_plan plan; /* `peers` is not valid any more */
	zp__layout layout;
	enum zp__mode mode;
	bool quantised;
	zp__neighbour *neighbours; /* ring: next and previous. direct: all others in order of rank */
	uint32_t neighbour_count;
	zp__link *next, *previous; /* ring; equal where world_size is 2 */
	zp__flow *flow;		   /* ring: to `next` */
	zp__slot *slots;
	uint32_t *owners;     /* used by the layout. All-reduce: NULL */
	zp__region workspace; /* in place with restore, and scatter of three or more peers: size of the tensor */
	zp__slot *copies;  /* direct: one per slot of our own chunk and neighbour, for its share and its result. ring: NULL */
	uint64_t window;   /* direct: slots of a chunk that are in flight at the same time */
	zp__region shares; /* direct: shares of our own chunk, `window` slots for each neighbour */
	zp__region wire; /* quantised, or wide sums: layout.wire_stride bytes per slot (direct: per slot of the window) */
	uint64_t rx_remaining, tx_remaining; /* frames */
	uint64_t resent_frames;
	uint64_t digest;
	uint64_t tx_bytes, rx_bytes;
	uint64_t moved_ns; /* when the last frame was complete */
	uint64_t due_ns;   /* it has stalled if nothing has moved until then (attempt.c) */
	/* At the last look: bytes that it and its links have moved, frames that remained, and that its links have moved. */
	uint64_t seen_bytes, seen_link_bytes, seen_frames, seen_link_frames;
	uint32_t pins;
	int status;   /* negative once it failed */
	bool done;    /* REDUCE_DONE was queued */
	bool ending;  /* zp_reduce_end() waits for the pins */
	zp__event event;
};

enum zp__rx_stage {
	ZP__RX_HEADER, /* receiving a header */
	ZP__RX_ADMIT,  /* the header is complete; its frame is not admitted yet */
	ZP__RX_BODY,   /* receiving the body into `attempt` or `message` */
	ZP__RX_DRAIN   /* reading the body and dropping it */
};

/* A frame that is being received, on a connection or (attempt.c) from where it was kept. */
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
	uint64_t due_ns;	 /* of a message: its link is lost if no byte comes until then. Under the lock */
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
	zp__connection *final_ack_of; /* the frame is the FINAL_ACK of this connection; NULL: it is none */
	uint8_t *aside; /* copy of the body of a frame whose attempt has ended; body points into it */
	bool active;
} zp__transmit;

/* An acknowledgement of the frames of one connection; embedded in that connection. */
typedef struct {
	zp__list node;		    /* in link->control while it is queued; see zp__retransmit */
	zp__connection *connection; /* the one that it acknowledges; constant */
	uint8_t kind;		    /* ZP__FINAL_ACK or ZP__ACK; constant */
	bool queued;
	uint32_t generation;
	uint64_t frames; /* FINAL_ACK: number of frames received. An ACK looks it up when it is sent */
} zp__control;

/* Frame counts of a connection, and the state of retransmission after it is lost. Owned by retransmit.c. */
typedef struct {
	uint32_t generation;	   /* of the open connection, or of the last one */
	uint32_t generation_spent; /* greatest generation that only the other end has added */
	uint64_t tx_frames, rx_frames; /* sent and received completely in this generation */
	uint64_t acknowledged;	   /* frames sent that the other end has acknowledged */
	bool closed;		   /* closed at this end; the other end's FINAL_ACK is missing */
	bool final_ack_received;   /* the other end has closed it, after it received `final_ack_frames` */
	uint64_t final_ack_frames;
	bool has_messages;     /* it has received messages, which the other end wants to have acknowledged */
	zp__control final_ack; /* ours for this connection: queued, in `carried` of the connection that sent it, or in no list */
	zp__control ack;       /* queued, or in no list */
	zp__list carried;      /* FINAL_ACKs for other connections that were sent on this one */
	zp__event event;       /* CONNECTION_LOST; holds a reference to the link while it is queued */
} zp__retransmit;

struct zp__connection {
	zp__link *link;	    /* constant */
	zp__thread *thread; /* constant while it is open */
	uint32_t index;	    /* in link->connections; constant */
	int fd;		    /* -1: closed */
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
	uint64_t begun_id;	 /* the greatest id that the other end is known to know */
	uint64_t eager_bytes;	 /* of all flows */
	bool announces;		 /* this end has announced ids */
	bool begun_queued;	 /* an announcement is to be sent */
	uint64_t moved_bytes;	 /* of attempts, sent and received */
	uint64_t moved_frames;	 /* of attempts, sent and received completely */
	uint64_t moved_ns;	 /* when the last of them was complete */
	uint64_t received_bytes; /* charged for messages that are being received, or not released */
	uint64_t message_bytes;	 /* queued, being sent, or not acknowledged */
	uint64_t writable_bytes; /* WRITABLE is reported once message_bytes is at most this; UINT64_MAX: not wanted */
	uint64_t resent_frames;
	uint32_t lost_count;
	bool local;	      /* both ends are on this host; constant */
	uint32_t senders_max; /* only the first senders_max open connections send frames; constant */
	zp__event event;
	uint32_t connection_count; /* used length of `connections`; constant */
	zp__connection connections[ZP_LINK_CONNECTIONS_MAX];
};

struct zp__thread {
	zp_engine *engine;
	pthread_t pthread;
	uint32_t index;
	bool started;
	zp__waiter waiter;
	zp__list run;	    /* connections with something to do; owned by the thread */
	zp__list attention; /* under the lock */
	bool woken;	    /* the wakeup was signalled since the thread last took the attention list; under the lock */
	uint8_t *scratch;   /* ZP__SCRATCH_BYTES, for bodies that are dropped; owned by the thread */
};

struct zp_engine {
	zp_engine_config config; /* constant */
	zp__queue queue;
	zp__wakeup wakeup; /* of `queue` */
	uint32_t thread_count;
	pthread_mutex_t mutex;
	pthread_cond_t unpinned; /* an ending attempt has no pins left, or is gone */
	bool stopping;		 /* threads must end */
	uint64_t id_known_max;
	uint64_t link_id_last;
	uint64_t links_check_ns; /* time of the next zp__links_check() */
	zp__list links, channels, parked, messages;
	zp__list early; /* of `messages`: frames of attempts that are not begun */
	zp__list attempts[ZP__ATTEMPT_BUCKETS];
	uint32_t attempt_count;
	zp__list buffers;
	uint32_t buffer_count;	 /* in `buffers` */
	uint64_t messages_bytes; /* charged for messages of all links that are being received, or not released */
	uint32_t link_count;	 /* in `links` */
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
uint64_t zp__now_ns(void);

/* wait.c. Where opening fails, the caller closes what was opened. */
int zp__wakeup_open(zp__wakeup *wakeup);
void zp__wakeup_close(zp__wakeup *wakeup);
void zp__wakeup_signal(int write_fd);
void zp__wakeup_drain(int read_fd);
int zp__waiter_open(zp__waiter *waiter);
void zp__waiter_close(zp__waiter *waiter);
int zp__waiter_add(zp__waiter *waiter, zp__connection *connection);
void zp__waiter_remove(zp__waiter *waiter, const zp__connection *connection);
/* Calls zp__connection_ready() for each connection on which something happened. Returns true if it was woken. */
bool zp__waiter_wait(zp__waiter *waiter, int timeout_ms);

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
zp__event *zp__event_next(const zp__queue *queue); /* lock held */
void zp__event_push(zp__queue *queue, zp__event *event); /* lock held */
void zp__event_withdraw(zp_engine *engine, zp__event *event); /* lock held */
void zp__id_note(zp_engine *engine, uint64_t id); /* lock held */
bool zp__id_is_known(const zp_engine *engine, uint64_t id); /* lock held */

/* loop.c */
int zp__thread_start(zp__thread *thread, zp_engine *engine, uint32_t index);
void zp__thread_wake(zp__thread *thread);			/* lock held */
void zp__connection_attend(zp__connection *connection);		/* lock held */
void zp__connection_ready(zp__connection *connection, bool readable, bool writable, bool hung_up);

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

/* early.c. All but zp__early_replay(): lock held. */
bool zp__is_eager(const zp__attempt *attempt);
zp__list *zp__frame_next(zp__link *link, zp__flow **flow); /* that may be sent, and its flow; NULL: none */
void zp__flow_begun(zp__link *link, zp__flow *flow); /* at the other end, or it is closed */
void zp__begun_offer(zp__link *link);
bool zp__begun_take(zp__connection *connection);
enum zp__verdict zp__begun_admit(zp__connection *connection);
void zp__early_drop(zp_engine *engine, const zp__link *link); /* those of the link, and those that are not waited for */
void zp__early_replay(zp_engine *engine, uint64_t id);

/* message.c */
enum zp__verdict zp__early_admit(zp__connection *connection);	     /* lock held */
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
enum zp__verdict zp__attempt_admit(zp__receive *rx);			       /* lock held; ZP__ADMIT: pinned */
void zp__attempt_unpin(zp_engine *engine, zp__attempt *attempt);	       /* lock held */
void zp__attempt_moved(zp__attempt *attempt, zp__link *link);			       /* lock held */
void zp__attempts_fail(zp__link *link, int status);			       /* lock held */
uint64_t zp__attempts_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__attempts_discard(zp_engine *engine);			 /* the threads have ended */

/* The algorithm of an attempt. */
struct zp__algorithm {
	int (*allocate)(zp__attempt *attempt); /* its own memory; the attempt is not in the table yet. -ENOMEM */
	void (*start)(zp__attempt *attempt);   /* lock held; counts the frames and queues the first ones */
	/* Lock held. ZP__ADMIT: sets rx.slot and rx.body; if it leaves rx.body NULL, make_room() sets it. */
	enum zp__verdict (*admit)(zp__attempt *attempt, zp__receive *rx);
	int (*make_room)(zp__receive *rx);		    /* pinned; before an admitted body is received. -ENOMEM */
	void (*landed)(zp__receive *rx);		    /* pinned; a frame is complete and its checksum is right */
	void (*prepare)(zp__connection *connection);	    /* pinned; makes header and body of the frame in c->tx */
	void (*sent)(zp__attempt *attempt, zp__slot *slot); /* lock held; the frame was sent completely */
	void (*unsent)(zp__attempt *attempt, zp__slot *slot); /* lock held; the frame is to be retransmitted */
	void (*cut)(zp__receive *rx); /* lock held; the connection was lost inside an admitted frame */
};

static inline uint64_t zp__stall_timeout_ns(const zp_engine *engine)
{
	return engine->config.stall_timeout_ms * (uint64_t)1000000;
}


extern const zp__algorithm zp__ring;	 /* ring.c */
extern const zp__algorithm zp__direct;	 /* direct.c */
extern const zp__algorithm zp__exchange; /* exchange.c: of an all-to-all */

#endif
