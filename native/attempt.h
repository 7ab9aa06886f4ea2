/* Attempts and their algorithms; see attempt.c.
 *
 * Before an I/O thread touches the memory of an attempt without the lock, it pins the attempt (attempt->pins, under the
 * lock); afterwards it unpins it. The thread that ends an attempt marks it as ending, waits for pins == 0 and then
 * detaches it from the connections. */
#ifndef ZP_ATTEMPT_H
#define ZP_ATTEMPT_H

#include <stdbool.h>
#include <stdint.h>

#include "event.h"
#include "layout.h"
#include "link.h"
#include "list.h"
#include "memory.h"
#include "zp_api.h"

typedef struct zp__algorithm zp__algorithm;
typedef struct zp__tree zp__tree;

enum {
	ZP__SLOT_REDUCED = 1, /* the reduce-scatter frame was received (or none comes here) and our share is added */
	ZP__SLOT_SENT = 2,    /* the reduce-scatter frame was sent (or none is sent from here) */
	ZP__SLOT_LANDING = 4, /* the all-gather frame is being received, or this peer owns the result and has it */
	ZP__SLOT_RESULT = 8,  /* the result is in the output */
	ZP__SLOT_SAVED = 16,  /* the old bytes of the output are in the workspace */
	ZP__SLOT_ARRIVING = 32 /* the reduce-scatter frame is being received */
};
/* In trees two flags have another meaning. In a slot: REDUCED, our share may be sent to the parent; SENT, it was sent.
 * In a copy: REDUCED, the result may be sent to the child; SENT, it was sent. */

/* A peer that an attempt sends frames to or gets them from. */
typedef struct {
	uint32_t rank;
	zp__link *link;
	zp__flow flow; /* to it */
} zp__neighbour;

/* The span of the tensor that one frame carries, and the frame that is queued for it. Two frames may be sent for one
 * slot (reduce-scatter, then all-gather); the first is always sent before the second exists. exchange.c uses slots in
 * its own way, described there. */
struct zp__slot {
	zp__list node;	   /* in the flow while it is queued, or sent and not known to have arrived; or in no list */
	uint64_t sequence; /* once sent: number of the frame on its connection, from 1 */
	uint32_t checksum; /* of the body to send: the lower half */
	uint8_t flags;
	uint8_t kind;	  /* to send: enum zp__frame_kind */
	union {
		uint16_t missing; /* trees, one-shot: number of shares not received yet */
		uint16_t lane;	  /* trees: the lane of a copy */
	};
};

/* Where the partial sums of a reduction are. */
enum zp__mode {
	ZP__OUT_OF_PLACE,     /* in the output; the input is only read */
	ZP__IN_PLACE_RESTORE, /* as IN_PLACE; the old bytes are saved to the workspace first */
	ZP__IN_PLACE,	      /* in the output, over the input; frames are received to a buffer of the connection */
	ZP__SCATTER	      /* in the workspace; those of our own part in the output */
};

struct zp__attempt {
	zp__list node; /* in a bucket of engine->attempts */
	zp_engine *engine;
	const zp__algorithm *algorithm;
	zp_reduce_plan plan; /* `peers` and `lanes` are no longer valid */
	zp__layout layout;
	enum zp__mode mode;
	bool quantised;
	zp__neighbour *neighbours; /* ring: next and previous. Others: all that frames go to or come from, by rank */
	uint32_t neighbour_count;
	zp__link *next, *previous; /* ring; equal if world_size is 2 */
	zp__flow *flow;		   /* ring: to `next` */
	zp__slot *slots;
	uint32_t *owners;     /* used by the layout. All-reduce: NULL */
	uint8_t *told;	      /* ids of all peers by rank, to send them the digest; NULL: nobody gets it */
	zp__region workspace; /* in place with restore, and scatter of three or more peers: size of the tensor */
	zp__tree *trees;      /* by lane */
	/* trees: one per slot and child, for the child's share and its result. one-shot: one per slot and neighbour,
	 * for our share and the neighbour's. ring: NULL */
	zp__slot *copies;
	uint64_t copy_count; /* trees */
	zp__region shares;   /* trees: shares of our children, for all windows; one-shot: shares of all others */
	/* Quantised, or wide sums: layout.wire_stride bytes per slot (trees: per slot of a window). one-shot: a copy of the
	 * input. */
	zp__region wire;
	uint64_t rx_remaining, tx_remaining; /* frames */
	uint64_t resent_frames; /* resent by us, or to be resent to us because only a part of them arrived */
	uint64_t digest;
	uint64_t tx_bytes, rx_bytes;
	uint64_t moved_ns; /* when the last frame was complete */
	uint64_t due_ns;   /* it has stalled if nothing moves until then (attempt.c) */
	/* At the last look: bytes that it has moved, bytes that its links have moved, frames that it had left, frames
	 * that its links have moved. */
	uint64_t seen_bytes, seen_link_bytes, seen_frames, seen_link_frames;
	uint32_t pins;
	int status;   /* negative once it failed */
	bool done;    /* REDUCE_DONE was queued */
	bool ending;  /* zp_reduce_end() waits for the pins */
	zp__event event;
};

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

extern const zp__algorithm zp__ring;	 /* ring.c */
extern const zp__algorithm zp__trees;	 /* trees.c */
extern const zp__algorithm zp__exchange; /* exchange.c: of an all-to-all */
extern const zp__algorithm zp__one_shot; /* one_shot.c */

/* Shares to reduce to one: `count` shares in order of rank; the one with index `place` is our own. */
typedef struct {
	uint32_t count, place;
	const uint32_t *inputs; /* number of inputs in the mean that each other share is; NULL: one each, or no means */
	uint32_t divisor;	/* of the sum; 1: the result is not a mean */
	bool everywhere;	/* all peers make the result: its NaNs all get the same bit pattern */
} zp__join;

/* shares.c. Pinned. Reduces the shares of others, which lie layout.wire_stride bytes apart, and our own. `result` may
 * be `own` or the first of `shares`, which are overwritten. Returns the checksum of the result. */
uint64_t zp__shares_join(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own,
			 uint8_t *shares, uint64_t elements);

zp__attempt *zp__attempt_find(zp_engine *engine, uint64_t id);		       /* lock held */
void zp__attempt_fail(zp__attempt *attempt, int status, const uint8_t *fault); /* lock held */
void zp__attempt_progress(zp__attempt *attempt);			       /* lock held */
enum zp__verdict zp__attempt_admit(zp__receive *rx);			       /* lock held; ZP__ADMIT: pinned */
void zp__attempt_unpin(zp_engine *engine, zp__attempt *attempt);	       /* lock held */
void zp__attempt_moved(zp__attempt *attempt, zp__link *link);			       /* lock held */
void zp__attempts_fail(zp__link *link, int status);			       /* lock held */
uint64_t zp__attempts_check(zp_engine *engine, uint64_t now_ns); /* lock held; the next deadline, or UINT64_MAX */
void zp__attempts_discard(zp_engine *engine);			 /* the threads have ended */

#endif
