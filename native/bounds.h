/* Bounds and sizes of the engine. Those that the caller sets are in zp_engine_config. */
#ifndef ZP_BOUNDS_H
#define ZP_BOUNDS_H

#include <stdint.h>

#define ZP__THREADS_MAX 16u
#define ZP__FRAME_BYTES_MIN 64u
#define ZP__FRAME_BYTES_MAX (16u << 20)
#define ZP__SLOTS_MAX (1u << 24)
#define ZP__WORLD_SIZE_MAX 2048u /* PEERS_MAX in limits.py */
#define ZP__ELEMENTS_MAX ((uint64_t)1 << 40)
#define ZP__ATTEMPT_BUCKETS 64u
#define ZP__SCRATCH_BYTES (64u << 10)
#define ZP__RECEIVE_BYTES (256u << 10) /* a body is received and checksummed in pieces that fit the L2 cache */
#define ZP__TURN_STEPS 8u /* receive steps in one turn of a connection: a usual frame takes no more */
#define ZP__PIECE_BYTES (16u << 10)    /* a received frame is reduced in pieces that fit the L1 cache */
#define ZP__WIDE_PIECE_BYTES (4u << 10) /* the same, for elements that are widened, to up to four times their size */
#define ZP__RATE_MIN (16u << 10)  /* bytes per second that attempts must move on average while no frame is complete */
#define ZP__ID_WINDOW 65536u /* ids up to this much below the greatest one may still be learnt */
#define ZP__EAGER_BYTES (4u << 20) /* of larger tensors, sent on a link before the receiver has begun them (early.c) */
#define ZP__EAGER_TENSOR_BYTES (256u << 10) /* a tensor up to this size is sent without waiting for that */
#define ZP__EARLY_CHARGE_MIN (4u << 10) /* an early frame is charged with at least this many bytes (message.c) */
#define ZP__EARLY_BUCKETS 1024u /* lists of early frames, by id: few calls meet frames of attempts that nobody begins */
#define ZP__SENT_CHARGE_MIN 256u /* a message that is not acknowledged is charged with at least this many bytes */
#define ZP__PACE_STEP_NS_MAX ((uint64_t)1000000000) /* no frame waits longer for the one before it (pace.c) */
#define ZP__TURN_FRAMES 1024u	  /* frames of others that may pass before an attempt that waits its turn has stalled */
#define ZP__SHM_RING_BYTES (1u << 20) /* one direction of a connection within a host */
#define ZP__POOL_REGIONS_MAX 16u
#define ZP__BUFFER_BYTES ((1u << 20) + (8u << 10)) /* fits a message with one block of state */
#define ZP__BUFFER_BYTES_MIN (256u << 10)	     /* smaller messages come from the heap */
#define ZP__BUFFERS_SPARE_MAX 48u
#define ZP__POOL_IDLE_NS ((uint64_t)5000000000)	  /* after this, idle memory is offered to the kernel (MADV_FREE) */
#define ZP__POOL_KEEP_NS ((uint64_t)600000000000) /* after this, idle memory is unmapped */
#define ZP__LANES_MAX 256u
#define ZP__TREES_WINDOW_BYTES (24u << 20)
#define ZP__TREES_WINDOW_SLOTS 8u /* of each lane, at least, except where a smallest frame or a quantisation block is larger */
#define ZP__RECORD_PLAINTEXT_BYTES (32u << 10) /* maximum of one record of an encrypted connection */
#define ZP__RECORDS_BUFFERED 4u /* records that an encrypted connection buffers in each direction */
/* Bounds on retransmission. An attempt fails after RESENDS_MIN frames plus RESENDS_PER_SLOT_MAX for each slot, both
 * directions together. A link is lost after MESSAGE_RESENDS_MAX retransmissions of a message. Without these bounds a
 * peer that closes one connection after another could keep the engine busy, or an attempt waiting, forever. */
#define ZP__RESENDS_PER_SLOT_MAX 16u
#define ZP__RESENDS_MIN 256u
#define ZP__MESSAGE_RESENDS_MAX 64u

#endif
