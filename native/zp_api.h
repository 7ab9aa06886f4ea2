/* zpccl data plane: the whole public interface. The C compiler and cffi read this same file (the build strips the
 * lines that start with '#include', '#if', '#endif' and the include guard for cffi).
 *
 * Ownership and threads
 * - The caller dials, accepts and authenticates TCP connections and hands the connected fds over with zp_link_open().
 *   From then on the engine owns them.
 * - The engine runs a few epoll threads. Each connection belongs to one of them for its whole life.
 * - There are no callbacks. What happened is put in a queue; zp_engine_fd() is an eventfd that is readable while the
 *   queue is not empty; zp_engine_poll() takes one event. A channel may have a queue of its own, for the thread that
 *   its messages are for. One thread at a time may poll each queue; all else may be called from any thread.
 * - Every function returns 0 (or a count) or -errno.
 *
 * Ids. Attempts and channels share one space of 64-bit ids that only grows. A frame whose id is above every id this
 * engine has been told of (zp_reduce_start, zp_reduce_end, zp_channel_open, zp_channel_close) makes its connection
 * wait: its attempt is about to be started here. A frame whose id is known and not active is read and dropped. So tell
 * of ids in rising order: frames of an id that is told of after a greater one may be gone, and its attempt then
 * stalls. Channels from ZP_FREE_CHANNEL on may be opened in any order, and nobody waits for them.
 */
#ifndef ZP_API_H
#define ZP_API_H

#include <stddef.h>
#include <stdint.h>

#define ZP_PEER_ID_BYTES 16
#define ZP_LINK_CONNECTIONS_MAX 64
#define ZP_SEAL_KEY_BYTES_MAX 32
#define ZP_FIRST_BYTES_MAX 1024
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

enum zp_op { ZP_SUM = 0, ZP_AVG = 1, ZP_PROD = 2, ZP_MAX = 3, ZP_MIN = 4 };

enum zp_quantization { ZP_QUANTIZE_NONE = 0, ZP_QUANTIZE_MIN_MAX = 1, ZP_QUANTIZE_ZERO_POINT_SCALE = 2 };

/* What elements travel as. The first two have the numbers of zp_dtype; the others are no types of tensors. */
enum zp_quantized { ZP_QUANTIZED_UINT8 = 0, ZP_QUANTIZED_INT8 = 1, ZP_QUANTIZED_UINT4 = 12, ZP_QUANTIZED_INT4 = 13 };

enum zp_algorithm {
	ZP_RING = 1,  /* cut through around the ring: 2 (N - 1) hops, links between neighbours only */
	ZP_DIRECT = 2 /* to the owner of each chunk and back: two hops and two roundings, links between all */
};

/* What a plan does. All but the broadcast cut the tensor into one chunk a peer, of which each is owned by one. */
enum zp_kind {
	ZP_ALL_REDUCE = 0,     /* everyone gets the combination of all inputs */
	ZP_BROADCAST = 1,      /* everyone gets the root's input, in place; one chunk */
	ZP_ALL_GATHER = 2,     /* everyone gets the inputs of all, one row a peer */
	ZP_REDUCE_SCATTER = 3, /* everyone gets the part it owns of the combination of all inputs */
	ZP_KINDS
};

enum zp_event_kind {
	ZP_EVENT_REDUCE_DONE = 1, /* All frames of `id` are sent and received (status 0), or it failed (-errno). */
	ZP_EVENT_LINK_LOST = 2,	  /* The link `id` to `peer` is closed; `status` says why. */
	ZP_EVENT_MESSAGE = 3,	  /* A message from `peer` on channel `id`; release `body` with zp_message_release(). */
	/* A connection of link `id` to `peer` is gone, others are left. What it had not delivered goes over these. Its
	 * place `connection` can be taken by zp_link_add() with a generation above `generation`. */
	ZP_EVENT_CONNECTION_LOST = 4,
	ZP_EVENT_ROOM = 5 /* A link for whose messages on channel `id` zp_message_post() found no room has room again. */
};

typedef struct zp_engine zp_engine;

typedef struct {
	uint32_t thread_count;
	uint32_t stall_timeout_ms;	  /* An attempt in which no byte moves for so long fails with -ETIMEDOUT. */
	uint32_t path_timeout_ms;	  /* A link whose other end acknowledges nothing for so long is lost. 0: never. */
	uint64_t message_bytes_max;	  /* A longer message closes the connection that announces it. */
	uint64_t messages_queued_bytes_max; /* Bound of received and not yet released messages, and of each send queue. */
	uint32_t local_senders_max; /* Of a link within this host, so many connections are sent on at a time. 0: all. */
} zp_engine_config;

/* How elements become codes; quantise.c says more. */
typedef struct {
	uint32_t algorithm;	 /* enum zp_quantization, not NONE */
	uint32_t quantized;	 /* enum zp_quantized */
	uint32_t dtype;		 /* enum zp_dtype, floating */
	uint32_t op;		 /* enum zp_op */
	uint32_t block_elements; /* that share one scale */
} zp_quantiser;

typedef struct {
	uint64_t attempt;
	uint32_t kind;		    /* enum zp_kind */
	uint32_t dtype;		    /* enum zp_dtype */
	uint32_t op;		    /* enum zp_op */
	uint32_t quantization;	    /* enum zp_quantization; only of floating dtypes, and only in an all-reduce */
	uint32_t quantized;	    /* enum zp_quantized; used only with quantisation */
	uint32_t block_elements;    /* elements that share one scale; used only with quantisation */
	uint32_t algorithm;	    /* enum zp_algorithm; all but an all-reduce go around the ring */
	uint32_t world_size;	    /* 2 or more */
	uint32_t rank;		    /* our place in `peers` */
	uint32_t frame_bytes;	    /* of tensor bytes, before quantisation */
	uint64_t count;		    /* elements */
	const uint8_t *peers;	    /* world_size ids in order of rank, ours among them; read by zp_reduce_start() only */
	const uint32_t *owners;	    /* rank that owns each row (all-gather), part (reduce-scatter) or the one chunk
				     * (broadcast: the root); every rank once; read by zp_reduce_start() only.
				     * all-reduce: NULL */
	const void *input;	    /* count elements; only read, unless it equals `output` */
	void *output;		    /* all-reduce: count elements, equal to `input` (in place) or without overlap;
				     * broadcast: equal to `input`; all-gather: world_size rows of count elements;
				     * reduce-scatter: our part. The first count % world_size parts are one element
				     * longer; NULL is legal for a part without elements */
	int32_t restore;	    /* in place: keep the old bytes, so that zp_reduce_end(commit=0) puts them back */
} zp_reduce_plan;

typedef struct {
	uint32_t kind; /* enum zp_event_kind */
	int32_t status;
	uint64_t id;			/* attempt, link or channel */
	uint8_t peer[ZP_PEER_ID_BYTES]; /* link, message: its other end. failed reduce: the peer at fault, or zeros */
	uint64_t digest;		/* of the result; equal on all peers iff the results are; reduce-scatter: 0 */
	uint64_t tx_bytes;		/* this attempt's, headers included */
	uint64_t rx_bytes;
	uint8_t *body;
	uint64_t body_bytes;
	uint32_t connection; /* of a lost connection: its place in the link, */
	uint32_t generation; /* and the last generation that was there */
} zp_event;

typedef struct {
	uint64_t link;		   /* its id */
	uint32_t connection_count; /* that it was opened with; the arrays have so many elements */
	uint32_t open_count;	   /* connections that are open now */
	uint32_t lost_count;	   /* connections that were lost and settled */
	uint32_t local;		   /* 1: both ends are on this host */
	uint64_t resent_frames;	   /* sent again because their connection was lost */
	uint64_t message_bytes;	   /* of messages: queued, being sent, or sent and not confirmed by the other end */
	uint64_t tx_bytes[ZP_LINK_CONNECTIONS_MAX]; /* of all connections that were in a place */
	uint64_t rx_bytes[ZP_LINK_CONNECTIONS_MAX];
	uint32_t generation[ZP_LINK_CONNECTIONS_MAX];
} zp_link_stats;

/* Functions of an AEAD, as libsodium declares them: output, its length, input, its length, additional data, its length,
 * secret nonce (unused), nonce, key; `decrypt` has the secret nonce in the third place. The output may be where the
 * input is. They return 0, or `decrypt` another number if the tag does not match. */
typedef int (*zp_encrypt)(unsigned char *, unsigned long long *, const unsigned char *, unsigned long long,
			  const unsigned char *, unsigned long long, const unsigned char *, const unsigned char *,
			  const unsigned char *);
typedef int (*zp_decrypt)(unsigned char *, unsigned long long *, unsigned char *, const unsigned char *,
			  unsigned long long, const unsigned char *, unsigned long long, const unsigned char *,
			  const unsigned char *);

/* How a connection is sealed: the cipher and the keys of its two directions, which must be of this connection only.
 * The functions must stay for as long as the process. */
typedef struct {
	zp_encrypt encrypt;
	zp_decrypt decrypt;
	uint32_t key_bytes, nonce_bytes, tag_bytes;
	uint8_t tx_key[ZP_SEAL_KEY_BYTES_MAX], rx_key[ZP_SEAL_KEY_BYTES_MAX];
} zp_seal;

/* Starts an engine and its threads. */
int zp_engine_open(const zp_engine_config *config, zp_engine **engine);

/* Stops the threads, closes every connection, forgets every attempt (running ones are ended as by
 * zp_reduce_end(commit=0)) and frees the engine. No other call may be in progress. NULL is legal. */
void zp_engine_close(zp_engine *engine);

/* The eventfd that is readable while events wait. It belongs to the engine. */
int zp_engine_fd(zp_engine *engine);

/* Takes the next event. Returns 1, or 0 when there is none (the eventfd is then drained). */
int zp_engine_poll(zp_engine *engine, zp_event *event);

/* Gives the engine `count` connected stream sockets to `peer`; it makes them non-blocking. `seals` has as many seals, or
 * is NULL: then nothing is encrypted, and CRCs tell damage but no forgery. `*link` becomes the id of the link. On
 * failure it has taken none of them. -EEXIST: there is a link to this peer, which must be closed first, or one of the
 * sockets is the engine's already. */
int zp_link_open(zp_engine *engine, const uint8_t peer[], const int *fds, const zp_seal *seals, uint32_t count,
		 uint64_t *link);

/* Puts a connection into the place `connection` of the link `link` to `peer`, where one is lost and settled. Both ends must use the same place and the same generation, which must be greater than any that
 * was there before (0 is that of the connections given to zp_link_open()).
 *
 * `seal` is NULL if, and only if, the connections of the link are not sealed.
 *
 * One end, the one that was dialled, adds first; only then the other end does. For that, `first` (up to
 * ZP_FIRST_BYTES_MAX bytes; may be NULL) is sent before the first frame, as it is: the end of the caller's handshake, which thus
 * goes out only where the connection has been taken. On failure nothing was sent and the fd is still the caller's.
 * -ENOTCONN: there is no such link; -EBUSY: the place is taken, or not settled yet; -ESTALE: the generation is not
 * greater; -EEXIST: the socket is the engine's already; -EINVAL. */
int zp_link_add(zp_engine *engine, const uint8_t peer[], uint64_t link, uint32_t connection, uint32_t generation, int fd,
		const zp_seal *seal, const void *first, uint32_t first_bytes);

/* Closes the link to `peer`: attempts that use it fail, no LINK_LOST follows. -ENOTCONN: there is none. */
int zp_link_close(zp_engine *engine, const uint8_t peer[]);

int zp_link_get_stats(zp_engine *engine, const uint8_t peer[], zp_link_stats *stats);

/* Starts an attempt at a collective. A REDUCE_DONE follows unless zp_reduce_end() comes first. Until zp_reduce_end()
 * returns, input and output belong to the engine. -ENOTCONN: no link to a peer that the algorithm needs one to: the
 * ranks beside ours in a ring, all of them for the direct exchange (the id counts as told of); -ENOMEM; -EINVAL. */
int zp_reduce_start(zp_engine *engine, const zp_reduce_plan *plan);

/* Ends an attempt, running or done, and gives the memory back: after it returns no thread of the engine reads or
 * writes it. commit=1 keeps the result (only legal after REDUCE_DONE with status 0, else -EINVAL); commit=0 cancels
 * and puts the old bytes of an in-place buffer back. Legal, and without effect but that the id counts as told of, for
 * an attempt that was never started. Does not wait for the network: a half-written frame is finished from a copy. */
int zp_reduce_end(zp_engine *engine, uint64_t attempt, int commit);

/* From open to close, messages on this id are delivered. `fd`, unless it is -1, is an eventfd, of which the engine makes a
 * descriptor of its own: then the events of the channel have a queue of their own, and the eventfd is written whenever
 * that gets its first one. */
int zp_channel_open(zp_engine *engine, uint64_t channel, int fd);
int zp_channel_close(zp_engine *engine, uint64_t channel);

/* Takes the next event of a channel with a queue of its own. Returns 1, or 0 when there is none. */
int zp_channel_poll(zp_engine *engine, uint64_t channel, zp_event *event);

/* Queues a message whose body is `head` and then `body`, which are copied. Never waits: -EAGAIN, there are messages in the
 * queue of the link, and with this one they would have more than `queue_bytes_max`; once they have no more than half of
 * that, a ROOM event of the channel follows: it may be of any link, so try all again. -ECANCELED: the channel is not open
 * here; -ENOTCONN: no link; -EMSGSIZE. One message may overtake another. */
int zp_message_post(zp_engine *engine, const uint8_t peer[], uint64_t channel, const void *head, uint64_t head_bytes,
		    const void *body, uint64_t body_bytes, uint64_t queue_bytes_max);

void zp_message_release(zp_engine *engine, uint8_t *body);

/* Quantisation without an engine, for tests and measurements; any thread may call. `isa`: 0 baseline, 1 AVX2,
 * 2 AVX-512, all bit for bit the same. Nothing need be aligned; wire and elements do not overlap. -EINVAL: something in
 * `how` is out of range; -ENOTSUP: this CPU lacks the instruction set. */

/* Bytes of `count` elements on the wire. */
int64_t zp_quantised_bytes(const zp_quantiser *how, uint64_t count);

/* Writes `count` elements to `wire`. */
int zp_quantise(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const void *elements, uint64_t count);

/* Replaces what `wire` holds by it op `local`, divided by `divisor` (1: not). */
int zp_quantise_fold(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const void *local, uint64_t count,
		     uint32_t divisor);

/* Writes to `wire` what `peers` have, 2 or more: `shares` of all but the one of `rank`, whose share is `local`, combined
 * in this order and divided by `divisor` (1: not). */
int zp_quantise_join(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const uint8_t *const shares[],
		     uint32_t peers, uint32_t rank, const void *local, uint64_t count, uint32_t divisor);

/* Writes the `count` elements that `wire` holds. */
int zp_dequantise(const zp_quantiser *how, uint32_t isa, void *elements, const uint8_t *wire, uint64_t count);

/* The name of the instruction set that the kernels use on this CPU: "avx512", "avx2" or "baseline". */
const char *zp_isa(void);

#endif
