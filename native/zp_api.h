/* zpccl data plane: the whole public interface. The C compiler and cffi both read this file; for cffi the build strips
 * '#include', '#if' and '#endif' lines and the include guard.
 *
 * Ownership and threads
 * - The caller dials, accepts and authenticates TCP connections and hands the connected fds over with zp_link_open().
 *   From then on the engine owns them.
 * - The engine runs a few I/O threads. Each connection belongs to one of them for its whole life.
 * - There are no callbacks. Events go to a queue. zp_engine_fd() is readable while the queue is not empty;
 *   zp_engine_poll() takes one event. A channel may have a queue of its own, for the thread that handles its messages.
 *   Only one thread at a time may poll each queue; every other function may be called from any thread.
 * - Every function returns 0 (or a count) or -errno.
 *
 * Ids of attempts have 63 bits and never repeat. The engine learns them from zp_reduce_start() and zp_reduce_end(), in
 * any order within ZP__ID_WINDOW ids below the greatest one (bounds.h). If the engine does not know the id of a frame's
 * attempt yet, it keeps the frame until the caller starts that attempt. The sender bounds what it sends before it knows
 * that the attempt was started (early.c). A frame of a known attempt that is not active is read and dropped. The caller
 * must also end an attempt that it will not start: otherwise the engine keeps the frames that others may have sent.
 *
 * The engine learns ids of channels from zp_channel_open() and zp_channel_close(), in ascending order. It drops
 * messages to a channel that is not open if it has learnt this id or a greater one. No message is sent until the other
 * end has opened its channel. Channels from ZP_FREE_CHANNEL on may be opened in any order. Messages to them are not
 * held back; those that arrive before the channel is open are dropped.
 */
#ifndef ZP_API_H
#define ZP_API_H

#include <stddef.h>
#include <stdint.h>

#define ZP_PEER_ID_BYTES 16
#define ZP_LINK_CONNECTIONS_MAX 128
#define ZP_AEAD_KEY_BYTES_MAX 32
#define ZP_FIRST_BYTES_MAX 1024
#define ZP_ONE_SHOT_BYTES_MAX 65536 /* ONE_SHOT_BYTES_MAX in limits.py */
#define ZP_FREE_CHANNEL 0x8000000000000000

enum zp_dtype {
	ZP_UINT8 = 0,
	ZP_INT8 = 1,
	ZP_UINT16 = 2,
	ZP_INT16 = 3,
	ZP_UINT32 = 4,
	ZP_INT32 = 5,
	ZP_UINT64 = 6,
	ZP_INT64 = 7,
	ZP_FLOAT16 = 8,
	ZP_BFLOAT16 = 9,
	ZP_FLOAT = 10,
	ZP_DOUBLE = 11
};

/* Integers wrap. AVG of those narrower than 64 bits does not: it divides the exact sum, toward zero. */
enum zp_op { ZP_SUM = 0, ZP_AVG = 1, ZP_PROD = 2, ZP_MAX = 3, ZP_MIN = 4 };

enum zp_quantization { ZP_QUANTIZE_NONE = 0, ZP_QUANTIZE_MIN_MAX = 1, ZP_QUANTIZE_ZERO_POINT_SCALE = 2 };

/* Type of an element on the wire. The first two have the values of zp_dtype; the 4-bit types exist on the wire only. */
enum zp_quantized { ZP_QUANTIZED_UINT8 = 0, ZP_QUANTIZED_INT8 = 1, ZP_QUANTIZED_UINT4 = 12, ZP_QUANTIZED_INT4 = 13 };

enum zp_algorithm {
	ZP_RING = 1,  /* cut-through ring: 2 (N - 1) hops; needs links between neighbours only */
	ZP_DIRECT = 2, /* to the owner of each chunk and back: two hops, two quantisations; needs links between all peers. Or
			* lanes of trees, each reduced up its tree and sent down it; needs links between parents and children */
	ZP_ONE_SHOT = 3 /* the whole tensor to all others: one hop; needs links between all peers. Not quantised. Its
			 * size in bytes * (world_size - 1) is at most ZP_ONE_SHOT_BYTES_MAX */
};

/* The collective. All except the broadcast cut the tensor into N chunks; each peer owns one of them, or gets it. */
enum zp_kind {
	ZP_ALL_REDUCE = 0,     /* every peer gets the reduction of all inputs */
	ZP_BROADCAST = 1,      /* every peer gets the root's input, in place; one chunk */
	ZP_ALL_GATHER = 2,     /* every peer gets the inputs of all, one row per peer */
	ZP_REDUCE_SCATTER = 3, /* every peer gets the part it owns of the reduction of all inputs */
	ZP_ALL_TO_ALL = 4,     /* every peer gets one row of each input: its own place in the order of ranks */
	ZP_KINDS
};

enum zp_event_kind {
	ZP_EVENT_REDUCE_DONE = 1, /* All frames of `id` are sent and received (status 0), or it failed (-errno). */
	ZP_EVENT_LINK_LOST = 2,	  /* The link `id` to `peer` is closed; `status` says why. */
	ZP_EVENT_MESSAGE = 3,	  /* A message from `peer` on channel `id`; release `body` with zp_message_release(). */
	/* Link `id` to `peer` has lost a connection; the others retransmit the frames that were not delivered.
	 * zp_link_add() may replace it at index `connection` with a generation greater than `generation`. */
	ZP_EVENT_CONNECTION_LOST = 4,
	ZP_EVENT_WRITABLE = 5 /* zp_message_post() on channel `id` found the queue of a link full; it has space again. */
};

typedef struct zp_engine zp_engine;

typedef struct {
	uint32_t thread_count;
	uint32_t stall_timeout_ms; /* An attempt fails with -ETIMEDOUT when it completes no frame for this long (attempt.c);
				    * a link is lost if a message makes no progress on it for this long. */
	uint32_t path_timeout_ms;  /* A link is lost when its other end acknowledges nothing for this long. 0: never. */
	uint64_t message_bytes_max; /* A connection that announces a longer message is closed. */
	/* Bound on received, unreleased messages of all links; at the bound each may have an equal share. Also the
	 * bound on the messages that one link has to send. */
	uint64_t messages_queued_bytes_max;
	uint32_t local_senders_max; /* Connections of a link within this host that send at the same time. 0: all. */
	uint32_t shared_memory; /* 1: bytes of Unix-domain sockets go through shared memory (shm.c); the other end must do so, too. */
} zp_engine_config;

/* How elements are quantised; quantise.c defines the format. */
typedef struct {
	uint32_t algorithm;	 /* enum zp_quantization, not NONE */
	uint32_t quantized;	 /* enum zp_quantized */
	uint32_t dtype;		 /* enum zp_dtype, floating */
	uint32_t op;		 /* enum zp_op */
	uint32_t block_elements; /* elements that share one scale */
} zp_quantiser;

/* A lane: a part of the tensor, and the tree up which it is reduced and down which the result goes. */
typedef struct {
	uint64_t elements;	 /* 0 is legal */
	const uint32_t *parents; /* by rank; the only root is its own parent */
} zp_lane;

typedef struct {
	uint64_t attempt;
	uint32_t kind;		    /* enum zp_kind */
	uint32_t dtype;		    /* enum zp_dtype */
	uint32_t op;		    /* enum zp_op */
	uint32_t quantization;	    /* enum zp_quantization; only for floating dtypes, and only in an all-reduce */
	uint32_t quantized;	    /* enum zp_quantized; used only with quantisation */
	uint32_t block_elements;    /* elements that share one scale; used only with quantisation */
	uint32_t algorithm;	    /* enum zp_algorithm; lanes, all-to-all: ZP_DIRECT; all-reduce: any; else ZP_RING */
	uint32_t world_size;	    /* 2 or more */
	uint32_t rank;		    /* our index in `peers` */
	uint32_t frame_bytes;	    /* tensor bytes of one frame, before quantisation */
	uint64_t count;		    /* elements; all-to-all: world_size rows of equal length */
	const uint8_t *peers;	    /* world_size ids in order of rank, ours included; read by zp_reduce_start() only */
	const uint32_t *owners;	    /* all-gather, reduce-scatter: the rank that owns each row or part; every rank
				     * occurs once. broadcast: one element, the root. all-reduce, all-to-all: NULL.
				     * Read by zp_reduce_start() only */
	const zp_lane *lanes;	    /* for ZP_DIRECT, except an all-to-all: they cover the tensor in order. In an
				     * all-gather each row is a lane, in a reduce-scatter each part, with its owner as
				     * root; in a broadcast all lanes have the root of the broadcast. NULL: in an
				     * all-reduce each rank is the root of all others, for an equal part. AVG of
				     * integers narrower than 64 bits: the root must be the parent of all. -EINVAL: a
				     * rank has so many children in all lanes together that it would have to buffer
				     * too much. Read by zp_reduce_start() only */
	uint32_t lane_count;	    /* 0 if `lanes` is NULL */
	const void *input;	    /* count elements; only read, unless it equals `output` */
	void *output;		    /* all-reduce: count elements, equal to `input` (in place) or without overlap;
				     * broadcast: equal to `input`; all-gather: world_size rows of count elements;
				     * reduce-scatter: our part. The first count % world_size parts are one element
				     * longer; NULL is legal for a part without elements; all-to-all: count
				     * elements, row i is from rank i */
	int32_t restore;	    /* in place: save the old bytes, so that zp_reduce_end(commit=0) can restore them */
	uint64_t digest_channel;    /* once the result is there, all other peers get its digest in a message on this
				     * channel: attempt, `call`, digest, each 64 bits, big-endian. 0: nobody does */
	uint64_t call;		    /* a number of the caller */
	uint64_t pace_us;	    /* with lanes: the frames to each peer are sent in equal steps over this time, and not
				     * earlier, such that all lanes progress evenly. 0: as fast as possible */
} zp_reduce_plan;

typedef struct {
	uint32_t kind; /* enum zp_event_kind */
	int32_t status;
	uint64_t id;			/* attempt, link or channel */
	uint8_t peer[ZP_PEER_ID_BYTES]; /* link, message: its other end. failed reduce: the peer at fault, or zeros */
	uint64_t digest;		/* of the result; peers compare it. reduce-scatter, all-to-all: 0 */
	uint64_t tx_bytes;		/* of this attempt, headers included */
	uint64_t rx_bytes;
	uint8_t *body;
	uint64_t body_bytes;
	uint32_t connection; /* of a lost connection: its index in the link */
	uint32_t generation; /* of a lost connection */
	int32_t told;	     /* of a reduce: its digest was sent to the other peers */
} zp_event;

typedef struct {
	uint64_t link;		   /* its id */
	uint32_t connection_count; /* places for connections: the used length of the arrays below */
	uint32_t open_count;	   /* connections that are open now */
	uint32_t lost_count;	   /* connections that were lost and whose frames were retransmitted */
	uint32_t local;		   /* 1: both ends are on this host */
	uint32_t senders;	   /* number of open connections that may take frames, at most connection_count */
	uint64_t message_bytes;	   /* charged for messages that are queued, being sent, or sent and not acknowledged */
	uint64_t tx_bytes[ZP_LINK_CONNECTIONS_MAX]; /* by index, summed over all generations */
	uint64_t rx_bytes[ZP_LINK_CONNECTIONS_MAX];
	uint32_t generation[ZP_LINK_CONNECTIONS_MAX];
} zp_link_stats;

/* TCP's counters of a link between hosts, by connection: a measurement is the difference of two of these. */
typedef struct {
	uint64_t link;		   /* its id */
	uint32_t connection_count; /* the used length of the arrays below */
	uint32_t round_trip_us;	   /* the least of all connections; UINT32_MAX: not known */
	uint32_t queued_us;	   /* by how much the longest one now exceeds that: the time in the path's queues */
	uint64_t acked_bytes[ZP_LINK_CONNECTIONS_MAX]; /* 0 if none is open now, and within a host */
	uint64_t busy_us[ZP_LINK_CONNECTIONS_MAX];     /* time with bytes to send, or not acknowledged */
	uint8_t limited[ZP_LINK_CONNECTIONS_MAX];      /* 1: recently the path was the limit, not the supply of bytes */
} zp_link_flow;

/* Functions of an AEAD, as libsodium declares them: output, its length, input, its length, additional data, its length,
 * secret nonce (unused), nonce, key; for `decrypt` the secret nonce is the third argument. Output and input may be the
 * same buffer. They return 0; `decrypt` returns another value if the tag does not match. */
typedef int (*zp_encrypt)(unsigned char *, unsigned long long *, const unsigned char *, unsigned long long,
			  const unsigned char *, unsigned long long, const unsigned char *, const unsigned char *,
			  const unsigned char *);
typedef int (*zp_decrypt)(unsigned char *, unsigned long long *, unsigned char *, const unsigned char *,
			  unsigned long long, const unsigned char *, unsigned long long, const unsigned char *,
			  const unsigned char *);

/* The cipher of an encrypted connection and the keys of its two directions, which no other connection may use. The
 * functions must stay valid until the process ends. */
typedef struct {
	zp_encrypt encrypt;
	zp_decrypt decrypt;
	uint32_t key_bytes, nonce_bytes, tag_bytes;
	uint8_t tx_key[ZP_AEAD_KEY_BYTES_MAX], rx_key[ZP_AEAD_KEY_BYTES_MAX];
} zp_aead;

/* Starts an engine and its threads. */
int zp_engine_open(const zp_engine_config *config, zp_engine **engine);

/* Stops the threads, closes every connection and ends every attempt as zp_reduce_end(commit=0) does. All this is over
 * when it returns, even if another thread has called it first. Other calls may be in progress, and later ones are legal:
 * what would give the engine something fails with -ESHUTDOWN, and no event is reported. Bodies of messages stay valid
 * until they are released. NULL is legal. */
void zp_engine_stop(zp_engine *engine);

/* Stops the engine and frees it. No other call may be in progress. Does nothing in a forked child. NULL is legal. */
void zp_engine_close(zp_engine *engine);

/* Closes `*engine`: for an owner that has memory for the pointer before there is an engine, and may end at any moment. */
void zp_engine_release(zp_engine **engine);

/* Returns the descriptor that is readable while events wait. The engine owns it. */
int zp_engine_fd(zp_engine *engine);

/* Takes the next event, messages after all others. Returns 1, or 0 when there is none; in that case the descriptor is
 * drained, unless the engine is stopped. */
int zp_engine_poll(zp_engine *engine, zp_event *event);

/* Whether zp_link_open() can share memory over Unix-domain sockets such as `fd`: 0, or -errno where a sandbox or a limit
 * forbids a step. The other end of `fd` is of no use then. */
int zp_shared_memory_check(int fd);

/* Gives the engine `count` connected stream sockets to `peer`; it makes them non-blocking. `aeads` has one element per
 * socket. If it is NULL nothing is encrypted; checksums then detect damage but not forgery. Sets `*link` to the id of the
 * link. A socket of -1 (the first must not be) is an empty place: zp_link_add() may fill it as if its connection had
 * been lost. On failure the caller still owns all fds. -EEXIST: there is a link to this peer, which must be closed
 * first, or the engine already owns one of the sockets. */
int zp_link_open(zp_engine *engine, const uint8_t peer[], const int *fds, const zp_aead *aeads, uint32_t count,
		 uint64_t *link);

/* Replaces a lost connection of the link `link` to `peer`, after ZP_EVENT_CONNECTION_LOST. Both ends must use the same
 * index `connection` and the same generation, which must be greater than every earlier generation at that index (the
 * connections given to zp_link_open() have generation 0).
 *
 * `aead` is NULL if and only if the link is not encrypted.
 *
 * The end that was dialled must add the connection before the dialling end does. So that the dialling end knows when,
 * the engine sends `first` (at most ZP_FIRST_BYTES_MAX bytes; may be NULL) unencrypted before the first frame, and only
 * if it takes the connection: it is the last message of the caller's handshake. On failure nothing was sent and the
 * caller still owns the fd. -ENOTCONN: there is no such link; -EBUSY: a connection is open at that index, or its
 * predecessor's frames are not retransmitted yet; -ESTALE: the generation is not greater; -EEXIST: the engine already
 * owns the socket; -EINVAL. */
int zp_link_add(zp_engine *engine, const uint8_t peer[], uint64_t link, uint32_t connection, uint32_t generation, int fd,
		const zp_aead *aead, const void *first, uint32_t first_bytes);

/* Closes the link to `peer`. Attempts that use it fail; no LINK_LOST follows. -ENOTCONN: there is no such link. */
int zp_link_close(zp_engine *engine, const uint8_t peer[]);

int zp_link_get_stats(zp_engine *engine, const uint8_t peer[], zp_link_stats *stats);

/* -ENOTCONN: there is no link. A system call for each connection. */
int zp_link_get_flow(zp_engine *engine, const uint8_t peer[], zp_link_flow *flow);

/* From now on only the first `senders` open connections of the link to `peer` take frames. -ENOTCONN: there is no link;
 * -EINVAL: `senders` is 0. */
int zp_link_set_senders(zp_engine *engine, const uint8_t peer[], uint32_t senders);

/* Starts an attempt at a collective. A REDUCE_DONE follows unless zp_reduce_end() comes first. Until zp_reduce_end()
 * returns, input and output belong to the engine. -ENOTCONN: a link is missing that the algorithm needs (ring: to the
 * next and previous rank; lanes: to parents and children; otherwise: to all ranks); the engine learns the id all the
 * same. -EEXIST: there is an attempt with this id. -ENOMEM; -EINVAL. */
int zp_reduce_start(zp_engine *engine, const zp_reduce_plan *plan);

/* Ends an attempt, running or done. After it returns no thread of the engine reads or writes input or output. commit=1
 * keeps the result (only legal after REDUCE_DONE with status 0; -EINVAL otherwise); commit=0 cancels and restores the
 * old bytes of an in-place buffer. For an attempt that was never started the only effect is that the engine learns the
 * id. Does not wait for the network: a half-written frame is finished from a copy. */
int zp_reduce_end(zp_engine *engine, uint64_t attempt, int commit);

/* From now on the digest of the attempt is not sent. Returns 1 if it was sent and the REDUCE_DONE that reports this was
 * not polled yet, otherwise 0. */
int zp_reduce_withhold(zp_engine *engine, uint64_t attempt);

/* hold=1: from now on no attempt stalls, because it may wait for a peer that cannot begin. hold=0: from now on attempts
 * may stall again, each after a whole timeout. Links are watched in both cases. */
void zp_stalls_hold(zp_engine *engine, int hold);

/* Messages on this id are delivered between open and close, and dropped after close, also those that still wait to be
 * sent. If `fd` is not -1 the channel has an event queue of its own, and 8 bytes are written to `fd` when that queue
 * stops being empty. It is an eventfd or the writing end of a pipe, non-blocking; the engine duplicates it. */
int zp_channel_open(zp_engine *engine, uint64_t channel, int fd);
int zp_channel_close(zp_engine *engine, uint64_t channel);

/* Takes the next event of a channel with a queue of its own. Returns 1, or 0 when there is none. */
int zp_channel_poll(zp_engine *engine, uint64_t channel, zp_event *event);

/* Queues a message with the body `head` followed by `body`; both are copied. Never blocks. -EAGAIN: the queue of the
 * link is not empty and would exceed `queue_bytes_max`; once a link holds at most half of that, a WRITABLE event of the
 * channel follows, or sooner. It does not name the link. -ECANCELED: the channel is not open here; -ENOTCONN: there is no
 * link; -EMSGSIZE. Messages may arrive in another order. */
int zp_message_post(zp_engine *engine, const uint8_t peer[], uint64_t channel, const void *head, uint64_t head_bytes,
		    const void *body, uint64_t body_bytes, uint64_t queue_bytes_max);

void zp_message_release(zp_engine *engine, uint8_t *body);

/* Quantisation without an engine, for tests and benchmarks; any thread may call. `isa`: 0 baseline, 1 AVX2, 2 AVX-512;
 * all give identical bits. No alignment is required; `wire` and `elements` must not overlap. -EINVAL: a field of `how`
 * is out of range; -ENOTSUP: this CPU lacks the instruction set. */

/* Returns the size in bytes of `count` elements on the wire. */
int64_t zp_quantised_bytes(const zp_quantiser *how, uint64_t count);

/* Quantises `count` elements to `wire`. */
int zp_quantise(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const void *elements, uint64_t count);

/* Reduces in place: wire = quantise((dequantise(wire) op local) / divisor). */
int zp_quantise_fold(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const void *local, uint64_t count,
		     uint32_t divisor);

/* Reduces the shares of all `peers` (2 or more) in order of rank, divides by `divisor` and quantises to `wire`. `shares`
 * are those of all ranks but `rank`, quantised; that of `rank` is `local`, not quantised. */
int zp_quantise_join(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const uint8_t *const shares[],
		     uint32_t peers, uint32_t rank, const void *local, uint64_t count, uint32_t divisor);

/* Dequantises `count` elements from `wire`. */
int zp_dequantise(const zp_quantiser *how, uint32_t isa, void *elements, const uint8_t *wire, uint64_t count);

/* Returns the instruction set that the kernels use on this CPU: "avx512", "avx2" or "baseline". */
const char *zp_isa(void);

#endif
