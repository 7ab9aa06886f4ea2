/* zpccl data plane: the whole public interface. The C compiler and cffi read this same file (the build strips the
 * lines that start with '#include', '#if', '#endif' and the include guard for cffi).
 *
 * Ownership and threads
 * - The caller dials, accepts and authenticates TCP connections and hands the connected fds over with zp_link_open().
 *   From then on the engine owns them.
 * - The engine runs a few epoll threads. Each connection belongs to one of them for its whole life.
 * - There are no callbacks. What happened is put in a queue; zp_engine_fd() is an eventfd that is readable while the
 *   queue is not empty; zp_engine_poll() takes one event. One thread at a time may poll; all else may be called from
 *   any thread.
 * - Every function returns 0 (or a count) or -errno.
 *
 * Ids. Attempts and channels share one space of 64-bit ids that only grows. A frame whose id is above every id this
 * engine has been told of (zp_reduce_start, zp_reduce_end, zp_channel_open, zp_channel_close) makes its connection
 * wait: its attempt is about to be started here. A frame whose id is known and not active is read and dropped. So tell
 * of ids in rising order: frames of an id that is told of after a greater one may be gone, and its attempt then
 * stalls.
 */
#ifndef ZP_API_H
#define ZP_API_H

#include <stddef.h>
#include <stdint.h>

#define ZP_PEER_ID_BYTES 16
#define ZP_LINK_CONNECTIONS_MAX 64

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

enum zp_event_kind {
	ZP_EVENT_REDUCE_DONE = 1, /* All frames of `id` are sent and received (status 0), or it failed (-errno). */
	ZP_EVENT_LINK_LOST = 2,	  /* The link `id` to `peer` is closed; `status` says why. */
	ZP_EVENT_MESSAGE = 3	  /* A message from `peer` on channel `id`; release `body` with zp_message_release(). */
};

typedef struct zp_engine zp_engine;

typedef struct {
	uint32_t thread_count;
	uint32_t stall_timeout_ms;	  /* An attempt in which no byte moves for so long fails with -ETIMEDOUT. */
	uint32_t path_timeout_ms;	  /* A link whose other end acknowledges nothing for so long is lost. 0: never. */
	uint64_t message_bytes_max;	  /* A longer message closes the connection that announces it. */
	uint64_t messages_queued_bytes_max; /* Bound of received and not yet released messages, and of each send queue. */
} zp_engine_config;

typedef struct {
	uint64_t attempt;
	uint32_t dtype;		    /* enum zp_dtype */
	uint32_t op;		    /* enum zp_op */
	uint32_t quantization;	    /* enum zp_quantization; only of floating dtypes */
	uint32_t block_elements;    /* elements that share one scale; used only with quantisation */
	uint32_t world_size;	    /* 2 or more */
	uint32_t rank;		    /* place in the ring */
	uint32_t frame_bytes;	    /* of tensor bytes, before quantisation */
	uint64_t count;		    /* elements */
	uint8_t next[ZP_PEER_ID_BYTES];	    /* gets our frames */
	uint8_t previous[ZP_PEER_ID_BYTES]; /* sends us frames; the same peer as `next` when world_size is 2 */
	const void *input;	    /* count elements; only read, unless it equals `output` */
	void *output;		    /* count elements; equal to `input` (in place) or without overlap */
	int32_t restore;	    /* in place: keep the old bytes, so that zp_reduce_end(commit=0) puts them back */
} zp_reduce_plan;

typedef struct {
	uint32_t kind; /* enum zp_event_kind */
	int32_t status;
	uint64_t id;			/* attempt, link or channel */
	uint8_t peer[ZP_PEER_ID_BYTES]; /* link: its other end. failed reduce: the neighbour at fault, or zeros */
	uint64_t digest;		/* of the whole result; equal on all peers iff the results are */
	uint64_t tx_bytes;		/* this attempt's, headers included */
	uint64_t rx_bytes;
	uint8_t *body;
	uint64_t body_bytes;
} zp_event;

typedef struct {
	uint32_t connection_count;
	uint64_t tx_bytes[ZP_LINK_CONNECTIONS_MAX];
	uint64_t rx_bytes[ZP_LINK_CONNECTIONS_MAX];
} zp_link_stats;

/* Starts an engine and its threads. */
int zp_engine_open(const zp_engine_config *config, zp_engine **engine);

/* Stops the threads, closes every connection, forgets every attempt (running ones are ended as by
 * zp_reduce_end(commit=0)) and frees the engine. NULL is legal. */
void zp_engine_close(zp_engine *engine);

/* Makes calls that wait return -ESHUTDOWN now, and later ones that would start something fail so. Legal beside other
 * calls; what is left to do before zp_engine_close() is to let them return. */
void zp_engine_shutdown(zp_engine *engine);

/* The eventfd that is readable while events wait. It belongs to the engine. */
int zp_engine_fd(zp_engine *engine);

/* Takes the next event. Returns 1, or 0 when there is none (the eventfd is then drained). */
int zp_engine_poll(zp_engine *engine, zp_event *event);

/* Gives the engine `count` connected stream sockets to `peer`; it makes them non-blocking. `*link` becomes the id of
 * the link. On failure it has taken none of them. -EEXIST: there is a link to this peer, which must be closed first, or
 * one of the sockets is the engine's already. */
int zp_link_open(zp_engine *engine, const uint8_t peer[], const int *fds, uint32_t count, uint64_t *link);

/* Closes the link to `peer`: attempts that use it fail, no LINK_LOST follows. -ENOTCONN: there is none. */
int zp_link_close(zp_engine *engine, const uint8_t peer[]);

int zp_link_get_stats(zp_engine *engine, const uint8_t peer[], zp_link_stats *stats);

/* Starts a ring all-reduce. A REDUCE_DONE follows unless zp_reduce_end() comes first. Until zp_reduce_end() returns,
 * input and output belong to the engine. -ENOTCONN: no link to `next` or `previous` (the id counts as told of);
 * -ENOMEM; -EINVAL. */
int zp_reduce_start(zp_engine *engine, const zp_reduce_plan *plan);

/* Ends an attempt, running or done, and gives the memory back: after it returns no thread of the engine reads or
 * writes it. commit=1 keeps the result (only legal after REDUCE_DONE with status 0, else -EINVAL); commit=0 cancels
 * and puts the old bytes of an in-place buffer back. Legal, and without effect but that the id counts as told of, for
 * an attempt that was never started. Does not wait for the network: a half-written frame is finished from a copy. */
int zp_reduce_end(zp_engine *engine, uint64_t attempt, int commit);

/* From open to close, messages on this id are delivered. */
int zp_channel_open(zp_engine *engine, uint64_t channel);
int zp_channel_close(zp_engine *engine, uint64_t channel);

/* Queues a message; the body is copied. Waits up to `timeout_ms` for room in the queue of the link. -ETIMEDOUT: no
 * room in that time; -ENOTCONN: no link; -EMSGSIZE. The frames of one message may overtake those of another. */
int zp_message_send(zp_engine *engine, const uint8_t peer[], uint64_t channel, const void *body, uint64_t body_bytes,
		    uint32_t timeout_ms);

void zp_message_release(zp_engine *engine, uint8_t *body);

/* The name of the instruction set that the kernels use on this CPU: "avx512", "avx2" or "baseline". */
const char *zp_isa(void);

#endif
